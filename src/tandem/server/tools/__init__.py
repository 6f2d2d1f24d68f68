"""Tool calls and reasoning, read from a model's text as it streams. Pure.

Each family's format is a generator over a `Feed` (`scan.py`), so that what is read does not depend on how the text is
cut into pieces. What a format does not understand stays content: malformed output never breaks a stream.
"""
