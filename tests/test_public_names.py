"""What `import tandem` offers, and that its types are."""

from __future__ import annotations

from pathlib import Path

import tandem


def test_the_package_offers_these_names_and_no_others() -> None:
    assert sorted(tandem.__all__) == ["AsyncLLM", "LLM", "RequestOutput", "SamplingParams", "StructuredOutputs", "__version__"]
    assert all(getattr(tandem, name) is not None for name in tandem.__all__)


def test_type_checkers_of_others_read_its_annotations() -> None:
    assert (Path(tandem.__file__).parent / "py.typed").is_file()
