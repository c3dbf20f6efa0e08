"""A load client for any server with the OpenAI completions API. `python -m benchmarks.serving --help`"""
