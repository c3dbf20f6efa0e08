"""Computes prompts and hands their KV over."""
