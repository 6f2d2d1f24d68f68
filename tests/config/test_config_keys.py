"""Files with API keys and what each of them may use."""

from __future__ import annotations

import pytest

from tandem.config.api_keys import ClientLimits, read_key_file
from tandem.config.loading import load
from tandem.errors import ConfigError


def test_limits_after_a_key(tmp_path):
    file = tmp_path / "keys"
    file.write_text(
        "# team\nplain\nheavy  requests_per_minute=600 weight=2.5 name=night-jobs\n"
        "  free\ttokens_per_minute=none max_concurrent_requests=1\n"
    )
    assert read_key_file(str(file), ClientLimits(requests_per_minute=60, tokens_per_minute=9)) == {
        "plain": ClientLimits(requests_per_minute=60, tokens_per_minute=9),
        "heavy": ClientLimits(requests_per_minute=600, tokens_per_minute=9, weight=2.5, name="night-jobs"),
        "free": ClientLimits(requests_per_minute=60, max_concurrent_requests=1),
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("secret rpm=5", r"line 2: after the key may stand, .*requests_per_minute=\.\.\."),
        ("secret requests_per_minute", "line 2: after the key may stand"),
        ("secret requests_per_minute=many", "requests_per_minute=many must be a whole number from 1"),
        ("secret tokens_per_minute=0", "must be a whole number from 1"),
        ("secret weight=none", "weight=none must be a number above 0"),
        ("secret name=a\x1bb", "must be 1 to 64 letters"),
        ("secret weight=nan", "must be a number above 0"),
        ("other", "line 2: this key stands in the file twice"),
    ],
)
def test_bad_lines_are_named_and_keys_never_quoted(tmp_path, line, message):
    file = tmp_path / "keys"
    file.write_text(f"other\n{line}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        load({"api_key_file": [str(file)]})
    assert caught.value.message.startswith("--api-key-file")
    assert "secret" not in caught.value.message
