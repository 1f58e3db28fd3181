"""Messages between ranks in the key-value store, independent of collectives.

failures     lines in the order of the store; the first that was not withdrawn is the cause of all others
pulses       one per rank: a growing count, its process, its activity

Entries are signed if the ranks share a secret:

    content   ->   hmac-sha256 <hex of HMAC-SHA256(secret, key and content)> <content>

A signature proves that the writer has the secret: no other process can forge a seat, a verdict or a failure. It does
not encrypt, and an old value of the same key stays valid. The addresses of groups, which torch writes, are not signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.distributed import PrefixStore, Store

from passes.errors import PlanError, Where
from planner.files.text import read_text
from runtime.distributed.faults.failure import Failure

_OF_A_FAILURE, _OF_A_JOINING = r'"rank": (\d{1,9})\b', r"\[(\d{1,9}), "
_FAILURES, _SESSION = "meshwright/failures", "meshwright/session"
SECRET = "MESHWRIGHT_SECRET"
LEAST_CHARACTERS = 16
_MARK = "hmac-sha256 "
_DIGITS = 64
_MOST_BYTES = 1 << 16
_MAKE_ONE = "create one with `openssl rand -hex 32`"


@dataclass(frozen=True, slots=True)
class Pulse:
    """A heartbeat. ``at``: the rank's activity for ``seconds``. ``line``: its source line, if it stays there.
    ``waits``: it waits there for other ranks. ``has_left``: it has left by itself, and beats no more. ``page``: the
    descriptor, in its process, of the page that it writes before each action.
    """

    rank: int
    beat: int
    host: str
    pid: int
    start: str
    at: str
    seconds: float = 0.0
    line: str = ""
    waits: bool = False
    has_left: bool = False
    page: int = -1

    @property
    def stuck(self) -> Failure:
        """The failure of a rank that stays at ``line``."""
        return Failure(self.rank, self.at, f"stuck for {self.seconds:.0f} s at {self.line}")


class Board:
    """The part of a store that the ranks of one attempt share.

    ``session``: number of the process groups; failures of earlier groups, which their ranks have outlived, do not
    count. None: all sessions, for the process that launched the ranks. ``signer``: signs all entries; reading raises
    PlanError for an entry without its signature.
    """

    def __init__(self, store: Store, session: int | None = None, signer: Signer | None = None) -> None:
        self.store: Any = store
        self.session, self.signer = session, signer or Signer()
        self._pulses: Any = PrefixStore(f"meshwright/pulses/{session}", store)

    # ---- failures

    def publish(self, failure: Failure) -> str:
        """Publish a failure and return its name for ``withdraw``."""
        name = uuid4().hex
        self._write_failure([name, self.session, failure])
        return name

    def withdraw(self, name: str) -> None:
        """Withdraw a failure: its rank continues."""
        self._write_failure([name])

    def _write_failure(self, content: list[Any]) -> None:
        """Append a line, with a newline before it too: another process may have written a part of a line."""
        self.store.append(_FAILURES, f"\n{self.signer.signed(_FAILURES, content)}\n")

    def first(self) -> Failure | None:
        return next(self.failures(), None)

    def failures(self) -> Iterator[Failure]:
        """Yield failures that were not withdrawn, in order. Raises PlanError at a line that is not signed."""
        if not self.store.check([_FAILURES]):
            return
        lines = filter(None, self.store.get(_FAILURES).decode(errors="replace").splitlines())
        contents = [self._failure(number, line) for number, line in enumerate(lines, 1)]
        withdrawn = {line[0] for line in contents if not isinstance(line, PlanError) and len(line) == 1}
        for line in contents:
            if isinstance(line, PlanError):
                raise line
            name, *rest = line
            if rest and name not in withdrawn and (None in (rest[0], self.session) or rest[0] == self.session):
                yield Failure(**rest[1])

    def _failure(self, number: int, line: str) -> list[Any] | PlanError:
        """Return the content of a line, or its error, which is raised in its turn: earlier failures come first."""
        try:
            return self.signer.checked(_FAILURES, line, f"failure {number}{_claimed(_OF_A_FAILURE, line)}")
        except PlanError as error:
            return error

    # ---- pulses

    def latest(self) -> Board:
        """Return the board of the newest session, for the process that launched the ranks; this one if it is unknown.

        A wrong signature of the number is ignored here: ranks read the number too, and publish their failure.
        """
        if not self.store.check([_SESSION]):
            return self
        try:
            session = self.signer.checked(_SESSION, self.store.get(_SESSION), "the number of the groups")
        except PlanError:
            return self
        return Board(self.store, session, self.signer)

    def join(self, pulse: Pulse) -> None:
        """Write the first beat of a rank."""
        self.beat(pulse)
        self.store.set(_SESSION, self.signer.signed(_SESSION, self.session))
        line = self.signer.signed(self._joined, [pulse.rank, pulse.host])
        self._pulses.append("joined", f"{line}\n")

    def beat(self, pulse: Pulse) -> None:
        self._pulses.set(str(pulse.rank), self.signer.signed(self._key(pulse.rank), pulse))

    def hosts(self) -> dict[int, str]:
        """Return the host of each rank that has joined."""
        if not self._pulses.check(["joined"]):
            return {}
        check = partial(self.signer.checked, self._joined)
        lines = self._pulses.get("joined").decode(errors="replace").splitlines()
        return dict(check(line, f"the joining{_claimed(_OF_A_JOINING, line)}") for line in lines)

    def pulses(self, ranks: Iterable[int]) -> dict[int, Pulse]:
        """Return the last pulses of ``ranks``, which must have joined."""
        ranks = list(ranks)
        contents = self._pulses.multi_get([str(rank) for rank in ranks]) if ranks else []
        check, pairs = self.signer.checked, zip(ranks, contents, strict=True)
        return {rank: Pulse(**check(self._key(rank), each, f"the pulse of rank {rank}")) for rank, each in pairs}

    def _key(self, rank: int) -> str:
        return f"pulse {self.session} {rank}"

    @property
    def _joined(self) -> str:
        return f"joined {self.session}"


def _claimed(pattern: str, content: str) -> str:
    """Return the rank that an unverified value claims, for a message; "" without one."""
    match = re.search(pattern, content)
    return f" of rank {match[1]}" if match else ""


class Signer:
    """A signer of values and dataclasses as JSON. ``secret`` "": nothing is signed or checked."""

    def __init__(self, secret: str = "") -> None:
        """Raises PlanError for a secret that is too short."""
        if 0 < len(secret) < LEAST_CHARACTERS:
            what = f"the secret has {len(secret)} characters, fewer than {LEAST_CHARACTERS}"
            raise PlanError(what, where=SECRET, fix=_MAKE_ONE)
        self._secret = secret.encode("utf-8", "surrogateescape")

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Signer:
        return cls(environment.get(SECRET, ""))

    def __bool__(self) -> bool:
        return bool(self._secret)

    def signed(self, key: str, value: Any) -> str:
        """Return the signed text of ``value``. ``key``: any name of the value that its readers also use."""
        content = json.dumps(value, default=asdict)
        return f"{_MARK}{self._digest(key, content)} {content}" if self else content

    def checked(self, key: str, stored: bytes | str, whose: str) -> Any:
        """Return the value. Raises PlanError, naming the value (``whose``), unless it is signed with this secret."""
        text = stored if isinstance(stored, str) else stored.decode("utf-8", "replace")
        is_signed = text.startswith(_MARK)
        if not self:
            if is_signed:
                raise _refused(f"{whose} in the store is signed, but this rank has no secret")
            return json.loads(text)
        if not is_signed:
            raise _refused(f"{whose} in the store is not signed, but this rank has a secret")
        start = len(_MARK) + _DIGITS
        digest, content = text[len(_MARK) : start], text[start + 1 :]
        if not hmac.compare_digest(digest.encode(), self._digest(key, content).encode()):
            raise _refused(f"{whose} in the store is signed with another secret, or was changed")
        return json.loads(content)

    def _digest(self, key: str, content: str) -> str:
        message = f"{len(key)} {key} {content}".encode("utf-8", "surrogateescape")
        return hmac.new(self._secret, message, hashlib.sha256).hexdigest()


def secret_in(file: Path) -> str:
    """Return the secret in a file, without outer white space. Raises PlanError, naming the file."""
    secret = read_text(file, "secret", most_bytes=_MOST_BYTES, fix=_MAKE_ONE).strip()
    if not secret or "\0" in secret:
        raise PlanError("the file holds no secret", where=Where(file=str(file)), fix=_MAKE_ONE)
    Signer(secret)
    return secret


def _refused(what: str) -> PlanError:
    return PlanError(what, where=SECRET, fix=f"give every host the same {SECRET}, and use a private network")
