"""Takes computed prompts over and generates tokens."""
