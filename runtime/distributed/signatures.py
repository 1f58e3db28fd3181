"""Entries of ranks in the store, signed if the ranks share a secret.

    content   ->   hmac-sha256 <hex of HMAC-SHA256(secret, key and content)> <content>

A signature proves that the writer has the secret: no other process can forge a seat, a verdict or a failure. It hides
nothing, and an old value of the same key stays valid. The addresses of groups, which torch writes, are not signed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from passes.errors import PlanError, Where
from planner.files.text import read_text

SECRET = "MESHWRIGHT_SECRET"
LEAST_CHARACTERS = 16
_MARK = "hmac-sha256 "
_DIGITS = 64
_MOST_BYTES = 1 << 16
_MAKE_ONE = "create one with `openssl rand -hex 32`"


class Signer:
    """Holds the secret; empty: values are neither signed nor checked."""

    def __init__(self, secret: str = "") -> None:
        """Raises PlanError for a secret that can be guessed."""
        if 0 < len(secret) < LEAST_CHARACTERS:
            raise PlanError(
                f"the secret has {len(secret)} characters, fewer than {LEAST_CHARACTERS}",
                where=SECRET,
                fix=_MAKE_ONE,
            )
        self._secret = secret.encode("utf-8", "surrogateescape")

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Signer:
        return cls(environment.get(SECRET, ""))

    def __bool__(self) -> bool:
        return bool(self._secret)

    def signed(self, key: str, content: str) -> str:
        """To be written under ``key``, which may be any name of the value that its readers know too."""
        return f"{_MARK}{self._digest(key, content)} {content}" if self else content

    def checked(self, key: str, stored: bytes | str, whose: str) -> str:
        """The content. Raises PlanError, naming ``whose`` value it is, unless it is signed with this secret."""
        text = stored if isinstance(stored, str) else stored.decode("utf-8", "replace")
        is_signed = text.startswith(_MARK)
        if not self:
            if is_signed:
                raise _refused(f"{whose} in the store is signed, but this rank has no secret")
            return text
        if not is_signed:
            raise _refused(f"{whose} in the store is not signed, but this rank has a secret")
        start = len(_MARK) + _DIGITS
        given, content = text[len(_MARK) : start], text[start + 1 :]
        if not hmac.compare_digest(given.encode(), self._digest(key, content).encode()):
            raise _refused(f"{whose} in the store is signed with another secret, or was changed")
        return content

    def _digest(self, key: str, content: str) -> str:
        message = f"{len(key)} {key} {content}".encode("utf-8", "surrogateescape")
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def secret_in(file: Path) -> str:
    """Without the white space around it. Raises PlanError, naming the file."""
    secret = read_text(file, "secret", most_bytes=_MOST_BYTES, fix=_MAKE_ONE).strip()
    if not secret or "\0" in secret:
        raise PlanError("the file holds no secret", where=Where(file=str(file)), fix=_MAKE_ONE)
    Signer(secret)
    return secret


def _refused(what: str) -> PlanError:
    return PlanError(what, where=SECRET, fix=f"give every host the same {SECRET}, and use a private network")
