"""TLS certificate, reloaded when its files change."""

from __future__ import annotations

import logging
import os
import ssl
import time
from _ssl import _test_decode_cert  # type: ignore[attr-defined]  # the standard library's only reader of certificates

from tandem.errors import ConfigError
from tandem.system.files import BY_HAND, read_regular

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""Seconds between checks of the files."""

DAY_S = 86400.0
WARN_DAYS = 14
"""Days before its end from which a certificate is warned of, once a day."""


class Certificate:
    """Certificate with an SSL `context` for new connections; open ones keep the context they started with."""

    def __init__(self, cert: str, key: str | None) -> None:
        """`cert`: PEM file with the chain; `key`: PEM file with the private key (None: the key is in `cert`).

        Raises ConfigError for unusable files.
        """
        self._cert, self._key = cert, key
        self._seen = self._state()
        self._ends = self._warned = 0.0
        self.context = self._load()

    def look(self) -> None:
        """Reload the files if they changed; on failure keep the certificate in use. Warn of one that ends soon."""
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self.context = self._load()
                self._warned = 0.0
                logger.info("the TLS certificate in %s was read again", self._cert)
            except ConfigError as error:
                logger.error("%s; new connections get the certificate as it was, until the files change again", error.message)
        if self._ends < (now := time.time()) + WARN_DAYS * DAY_S and now > self._warned + DAY_S:
            self._warned = now
            ends = time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime(self._ends))
            logger.warning(
                "the TLS certificate in %s ends at %s; clients refuse the server from then on: renew it", self._cert, ends
            )

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
            self._ends = ssl.cert_time_to_seconds(str(_test_decode_cert(self._cert)["notAfter"]))
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
