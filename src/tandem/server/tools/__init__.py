"""Streaming parsers of tool calls and reasoning in a model's text. Pure.

Each model family's format is a generator over a `Feed` (`scan.py`), so that results do not depend on how the text is
chunked. Unparsable text stays content: malformed output never breaks a stream.
"""
