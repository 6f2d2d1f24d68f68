"""TLS certificate, reloaded when its files change."""

from __future__ import annotations

import logging
import os
import ssl

from tandem.errors import ConfigError
from tandem.system.files import BY_HAND, read_regular

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between checks of the files."""


class Certificate:
    """Certificate with an SSL `context` for new connections; open ones keep the context they started with."""

    def __init__(self, cert: str, key: str | None) -> None:
        """`cert`: PEM file with the chain; `key`: PEM file with the private key (None: the key is in `cert`).

        Raises ConfigError for unusable files.
        """
        self._cert, self._key = cert, key
        self._seen = self._state()
        self.context = self._load()

    def look(self) -> None:
        """Reload the files if they changed; on failure keep the certificate in use."""
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self.context = self._load()
        except ConfigError as error:
            logger.error("%s; new connections get the certificate as it was, until the files change again", error.message)
        else:
            logger.info("the TLS certificate in %s was read again", self._cert)

    def _state(self) -> tuple[tuple[int, ...], ...]:
        return tuple(_stamp(path) for path in (self._cert, self._key) if path is not None)

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        flag, path = ("--tls-cert", self._cert) if self._key is None else ("--tls-key", self._key)
        try:
            for path_read in filter(None, (self._cert, self._key)):
                read_regular(path_read, BY_HAND)  # OpenSSL's error does not name the unreadable file
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except ssl.SSLError as error:
            reason = "there is no certificate, or no private key, in PEM format"
            if error.reason == "KEY_VALUES_MISMATCH":
                reason = "the key is not that of the certificate"
            raise ConfigError(f"--tls-cert {self._cert}, {flag} {path}: {reason}", param="tls_cert") from None
        except OSError as error:
            wrong = "--tls-key" if error.filename == self._key else "--tls-cert"
            raise ConfigError(f"{wrong} {error.filename}: cannot be read ({error.strerror})", param="tls_cert") from None
        return context


def _no_password() -> str:
    raise ConfigError(
        "--tls-key: the key is encrypted; `openssl pkey -in KEY -out PLAIN` writes one that is not (mode 600)", param="tls_key"
    )


def _stamp(path: str) -> tuple[int, ...]:
    try:
        info = os.stat(path)
    except OSError:
        return ()
    return info.st_mtime_ns, info.st_size, info.st_ino
