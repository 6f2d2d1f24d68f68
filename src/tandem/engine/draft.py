"""The draft model of a layout: found, and held against the model that it drafts for."""

from __future__ import annotations

from tandem.checkpoints.files import ModelFiles
from tandem.checkpoints.resolve import resolve
from tandem.config.settings import Settings
from tandem.config.speculation import with_speculative_config
from tandem.errors import ConfigError
from tandem.models.description import ModelDescription, describe
from tandem.text.tokenizer import load_tokenizer


def find_draft_model(settings: Settings, files: ModelFiles, description: ModelDescription) -> ModelFiles | None:
    """The draft model that the settings name, None if they name none.

    Raises ConfigError when its tokens are not those of the model in `files`, ModelError when it cannot be run.
    """
    name = with_speculative_config(settings.speculation).draft_model
    if not name:
        return None
    if settings.model.weights_from == "head":
        raise ConfigError(f"--draft-model {name}: is read from the machine of the rank that samples, which "
                          "--weights-from head does not do; leave one out", param="draft_model")
    draft = resolve(name)
    ours = load_tokenizer(files, trust_remote_code=settings.model.trust_remote_code)
    theirs = load_tokenizer(draft, trust_remote_code=settings.model.trust_remote_code)
    for token in range(max(description.vocab_size, describe(draft).vocab_size)):
        mine, other = ours.token_bytes(token), theirs.token_bytes(token)
        if mine != other:
            raise ConfigError(f"--draft-model {name}: has another tokenizer than {files.name}: token {token} is "
                              f"{other!r} there and {mine!r} here; choose a smaller model of the same family",
                              param="draft_model")
    return draft
