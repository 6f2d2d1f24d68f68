"""One `tandem serve` for all clients, with a tiny random model whose context is long enough for their prompts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from served import served
from tandem.testing import tiny_model

CONTEXT = 16384


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = tiny_model(tmp_path_factory.mktemp("model"), config={"max_position_embeddings": CONTEXT})
    with served(str(model), "--max-context", str(CONTEXT), "--default-max-tokens", "32") as address:
        yield address
