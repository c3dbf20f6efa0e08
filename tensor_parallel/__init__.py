"""Ranks of one worker as processes of one machine: what they say to each other, and over what."""
