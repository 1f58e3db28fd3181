"""With a secret, values that nobody else can have written: others are one error that names whose they are."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore
from typer.testing import CliRunner

from passes.errors import PlanError
from planner.mesh import Mesh
from runtime.cli import app
from runtime.distributed import meeting
from runtime.distributed.faults.activity import Activity
from runtime.distributed.faults.board import SECRET, Board, Pulse, Signer, secret_in
from runtime.distributed.faults.failure import Failure
from runtime.distributed.faults.watch import Watch
from runtime.distributed.launch import launch
from runtime.distributed.meeting import Rendezvous, Seat, Verdict
from runtime.distributed.opening import open_groups
from tests.tools.limits import HANG_SECONDS

OURS, OTHER, NONE = Signer("a secret of this run"), Signer("a secret of another"), Signer()
PULSE = Pulse(1, 1, "node1", 7, "0", "step 1")
NOT_SIGNED = "is not signed, but this rank has a secret"
WRONG = "is signed with another secret, or was changed"
NO_SECRET = "is signed, but this rank has no secret"


def test_a_signed_value_is_read_with_the_secret_alone():
    stored = OURS.signed("seat/1", "content")
    assert OURS.checked("seat/1", stored.encode(), "it") == "content"
    assert "a secret" not in stored
    assert NONE.checked("seat/1", NONE.signed("seat/1", "content"), "it") == "content"
    for reader, key, value, told in (
        (OURS, "seat/1", "content", NOT_SIGNED),
        (OURS, "seat/1", stored[:-1] + "T", WRONG),
        (OURS, "seat/2", stored, WRONG),
        (OURS, "seat/1", "hmac-sha256 ", WRONG),
        (OTHER, "seat/1", stored, WRONG),
        (NONE, "seat/1", stored, NO_SECRET),
    ):
        with pytest.raises(PlanError, match=f"^the seat in the store {told}"):
            reader.checked(key, value, "the seat")


def meet_with(*signers: Signer, hosts: tuple[str, ...] = ("a", "a", "a")) -> dict[int, Verdict | str]:
    store, heard = HashStore(), {}

    def one(rank: int, signer: Signer) -> None:
        try:
            timeout = timedelta(seconds=HANG_SECONDS)
            heard[rank] = Rendezvous(store, rank, len(signers), timeout, signer).meet(Seat(hosts[rank]))
        except PlanError as error:
            heard[rank] = error.what

    threads = [threading.Thread(target=one, args=given) for given in enumerate(signers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    return heard


def test_ranks_of_one_secret_meet():
    assert meet_with(OURS, OURS, OURS) == dict.fromkeys(range(3), Verdict("gloo"))


@pytest.mark.parametrize(
    ("odd", "of_rank_0", "of_rank_2"), [(NONE, NOT_SIGNED, NO_SECRET), (OTHER, WRONG, WRONG)], ids=["none", "another"]
)
def test_a_rank_without_the_secret_is_named_on_all(odd, of_rank_0, of_rank_2):
    heard = meet_with(OURS, OURS, odd)
    assert heard[0] == heard[1] == f"the seat of rank 2 in the store {of_rank_0}"
    assert heard[2] == f"the decision of rank 0 in the store {of_rank_2}"


def test_several_hosts_without_a_secret_are_warned_once(capsys, monkeypatch):
    monkeypatch.setattr(meeting, "_has_warned", False)
    meet_with(NONE, NONE)
    meet_with(OURS, OURS, hosts=("a", "b"))
    assert capsys.readouterr().err == ""
    meet_with(NONE, NONE, NONE, hosts=("a", "b", "b"))
    meet_with(NONE, NONE, hosts=("a", "b"))
    assert capsys.readouterr().err.count("warning: 2 hosts share a store without a secret") == 1


def test_a_board_reads_what_its_ranks_have_written_alone():
    store, failure = HashStore(), Failure(1, "rank 1", "KeyError: 'a'")
    board = Board(store, 1, OURS)
    board.join(PULSE)
    name = board.publish(failure)
    assert (board.first(), board.hosts(), board.pulses([1])) == (failure, {1: "node1"}, {1: PULSE})
    latest = Board(store, None, OURS).latest()
    assert (latest.session, latest.first()) == (1, failure)
    board.withdraw(name)
    assert board.first() is None


@pytest.mark.parametrize("count", [10**12, -(10**12), 3])
def test_counts_that_a_stranger_writes_hide_no_failure(count):
    store, failures = HashStore(), [Failure(rank, f"rank {rank}", "KeyError: 'a'") for rank in range(2)]
    board = Board(store, 1, OURS)
    for key in ("meshwright/failures/count", "meshwright/pulses/1/joined/count"):
        store.add(key, count)
    first, _ = map(board.publish, failures)
    assert list(board.failures()) == failures
    store.add("meshwright/failures/count", count)
    board.withdraw(first)
    assert list(Board(store, None, OURS).failures()) == failures[1:]


def test_a_line_that_a_stranger_leaves_open_spoils_no_failure_that_was_there_before():
    store, failure = HashStore(), Failure(1, "rank 1", "KeyError: 'a'")
    board = Board(store, 1, OURS)
    name = board.publish(failure)
    store.append("meshwright/failures", "noise")  # pyright: ignore[reportAttributeAccessIssue]
    assert board.first() == failure
    board.withdraw(name)
    with pytest.raises(PlanError, match=f"^failure 2 in the store {NOT_SIGNED}"):
        board.first()


def test_the_launcher_believes_no_other_number_of_the_groups():
    """A rank with another secret has written it last: the failures of all ranks are still on the board."""
    store, failure = HashStore(), Failure(0, "rank 0", "the seat of rank 1 is not signed")
    Board(store, 1, OURS).publish(failure)
    Board(store, 1, OTHER).join(PULSE)
    latest = Board(store, None, OURS).latest()
    assert (latest.session, latest.first()) == (None, failure)


def forged_failure(board: Board) -> object:
    board.publish(Failure(1, "rank 1", "no cause"))
    return Board(board.store, 1, OURS).first()


def forged_pulse(board: Board) -> object:
    board.beat(PULSE)
    return Board(board.store, 1, OURS).pulses([1])


def forged_joining(board: Board) -> object:
    board.join(PULSE)
    return Board(board.store, 1, OURS).hosts()


FORGED = {
    "failure 1 of rank 1": forged_failure,
    "the pulse of rank 1": forged_pulse,
    "the joining of rank 1": forged_joining,
}


@pytest.mark.parametrize("whose", FORGED)
@pytest.mark.parametrize(("signer", "told"), [(NONE, NOT_SIGNED), (OTHER, WRONG)], ids=["none", "another"])
def test_what_others_write_on_a_board_is_refused_by_name(whose, signer, told):
    with pytest.raises(PlanError, match=f"^{whose} in the store {told}"):
        FORGED[whose](Board(HashStore(), 1, signer))


def test_a_rank_that_reads_a_forged_failure_publishes_that_in_its_place():
    store = HashStore()
    forged_by = Board(store, 1, OTHER)
    forged_by.publish(Failure(1, "rank 1", "invented"))
    watch = Watch(Board(store, 1, OURS), Activity(0), 1)
    watch.start()
    try:
        until = time.monotonic() + HANG_SECONDS
        while watch.first is None and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        watch.stop()
    assert watch.first is not None
    assert watch.first.cause == f"failure 1 of rank 1 in the store {WRONG}"
    assert watch.first.is_input


def open_with(secret_of_rank_1: str | None) -> str:
    if os.environ["RANK"] == "1" and secret_of_rank_1 is not None:
        os.environ[SECRET] = secret_of_rank_1
    open_groups(Mesh(tp=2), {}, [], timeout_seconds=HANG_SECONDS).close()
    return os.environ[SECRET]


@pytest.mark.slow
def test_launched_ranks_share_a_secret_of_their_own_and_no_other_is_believed(monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    first, second = launch(open_with, 2, None, timeout_seconds=HANG_SECONDS)
    assert first == second
    assert len(first) == 64
    with pytest.raises(PlanError, match=rf"of rank 1 in the store {WRONG}"):
        launch(open_with, 2, "some other secret", timeout_seconds=HANG_SECONDS)


def stand_under_a_forged_failure() -> None:
    groups = open_groups(Mesh(tp=2), {}, [], timeout_seconds=HANG_SECONDS)
    board = groups.faults.board
    assert board is not None
    if groups.rank == 0:
        Board(board.store, board.session).publish(Failure(1, "rank 1", "invented"))
    time.sleep(2 * HANG_SECONDS)


@pytest.mark.thorough
@pytest.mark.slow
def test_ranks_that_compute_are_ended_by_an_entry_that_is_not_signed_and_do_not_believe_it(capfd):
    with pytest.raises(PlanError, match=f"failure 1 of rank 1 in the store {NOT_SIGNED}") as caught:
        launch(stand_under_a_forged_failure, 2, timeout_seconds=HANG_SECONDS)
    assert "invented" not in str(caught.value) + capfd.readouterr().err


def test_a_secret_comes_from_a_file(tmp_path: Path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    assert secret_in(file) == "0123456789abcdef"
    for content, told in (("", "the file holds no secret"), ("short", "the secret has 5 characters, fewer than 16")):
        file.write_text(content)
        with pytest.raises(PlanError, match=told):
            secret_in(file)
    monkeypatch.setenv(SECRET, "")
    arguments = ["train", "none.py:none", "none.yaml", "--data", "stdlib", "--secret-file", str(tmp_path / "absent")]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2
    assert "there is no secret file" in found.output
