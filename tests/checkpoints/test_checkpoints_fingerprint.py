"""No two models are taken for one, and one for itself as long as nobody changes it."""

from __future__ import annotations

import os

from tandem.checkpoints.files import fingerprint
from tandem.testing import tiny_model


def test_any_change_of_weights_or_config_shows(tmp_path):
    model = tiny_model(tmp_path / "model", dtype="float32")
    seen = {fingerprint(model)}
    assert fingerprint(model.rename(tmp_path / "renamed")) in seen
    model = tmp_path / "renamed"
    weights = next(model.glob("*.safetensors"))
    with weights.open("r+b") as file:  # between two samples, where it shows by its time alone
        file.truncate(weights.stat().st_size + (64 << 20))
        seen.add(fingerprint(model))
        file.seek(-100_000, os.SEEK_END)
        file.write(b"x")
    os.utime(weights, ns=(1, 1))
    for path in (weights, model / "config.json"):
        assert fingerprint(model) not in seen
        seen.add(fingerprint(model))
        os.utime(path, ns=(2, 2))
    assert fingerprint(model) not in seen
    assert fingerprint(model, tiny_model(tmp_path / "adapter")) not in seen
