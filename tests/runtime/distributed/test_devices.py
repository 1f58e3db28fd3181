"""The table of environments: which rank this is and which device is its own, or one clear error."""

import resource

import pytest
import torch

from passes.errors import PlanError
from runtime.distributed import this_host
from runtime.distributed.devices import Launched, choose_device, known_rank, launched
from runtime.distributed.launch import launch
from runtime.profiling.memory import compare_memory
from tests.tools.commands import python

ENVIRONMENTS = {
    "alone": ({}, Launched(None, 1)),
    "torchrun": ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, Launched(5, 8, 1, 4)),
    "srun": ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}, Launched(5, 8, 1)),
    "a batch script of Slurm, one process": (
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
        Launched(None, 1),
    ),
    "torchrun under srun": (
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "RANK": "9", "WORLD_SIZE": "16"}
        | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"},
        Launched(9, 16, 1, 8),
    ),
    "srun, ranks set by hand": (
        {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "RANK": "5", "WORLD_SIZE": "8"},
        Launched(5, 8, 1),
    ),
    "mpirun of Open MPI": (
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
        | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        Launched(3, 4, 1, 2),
    ),
    "mpiexec of MPICH": (
        {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        Launched(3, 4, 1, 2),
    ),
    "nothing local": ({"RANK": "1", "WORLD_SIZE": "2"}, Launched(1, 2)),
}


@pytest.mark.parametrize(("environment", "expected"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_a_launcher_is_read(environment, expected):
    assert launched(environment) == expected


def test_a_group_that_exists_says_who_this_is():
    environment = {"LOCAL_RANK": "1", "RANK": "7"}
    assert launched(environment, (2, 4)) == Launched(2, 4, 1)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "1"}, "the environment sets RANK but not WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "the environment sets WORLD_SIZE but not RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is not one of 2 ranks"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'"),
    ],
    ids=str,
)
def test_half_an_environment_is_one_clear_error(environment, told):
    with pytest.raises(PlanError, match=told) as caught:
        known_rank(launched(environment))
    assert caught.value.fix


OF_TORCHRUN = Launched(5, 8, 1, 4)
UNKNOWN = Launched(5, 8)
DEVICES = [
    # given, launched, GPUs that this process sees, the device or the words of the error
    (None, Launched(None, 1), 0, "cpu"),
    (None, Launched(None, 1), 1, "cuda:0"),
    (None, Launched(None, 1), 8, "cuda:0"),
    (None, Launched(0, 1, 3, 8), 8, "cuda:3"),
    (None, OF_TORCHRUN, 0, "cpu"),
    (None, OF_TORCHRUN, 4, "cuda:1"),
    (None, OF_TORCHRUN, 8, "cuda:1"),
    (None, OF_TORCHRUN, 1, "cuda:0"),  # each rank sees its own; if it is the same one, the meeting finds it
    (None, OF_TORCHRUN, 2, "this host runs 4 ranks, but a rank sees 2 GPUs"),
    (None, Launched(5, 8, 1), 2, "cuda:1"),
    (None, Launched(5, 8, 3), 2, "this host runs a local rank 3, but a rank sees 2 GPUs"),
    (None, UNKNOWN, 0, "cpu"),
    (None, UNKNOWN, 1, "cuda:0"),
    (None, UNKNOWN, 8, "it is not known which of the 8 GPUs belongs to this rank: LOCAL_RANK is not set"),
    ("cuda", OF_TORCHRUN, 4, "cuda:1"),
    ("cuda", OF_TORCHRUN, 1, "cuda:0"),
    ("cuda", UNKNOWN, 8, "it is not known which of the 8 GPUs"),
    ("cuda", Launched(None, 1), 8, "cuda:0"),
    ("cuda", OF_TORCHRUN, 0, 'the device "cuda" was requested, but this process sees no GPU'),
    ("cuda:2", OF_TORCHRUN, 4, "cuda:2"),
    ("cuda:2", OF_TORCHRUN, 2, 'the device "cuda:2" was requested, but this process sees 2 GPUs'),
    ("cuda:0", UNKNOWN, 1, "cuda:0"),
    (torch.device("cuda", 3), UNKNOWN, 8, "cuda:3"),
    ("cpu", OF_TORCHRUN, 4, "cpu"),
    ("cpu", UNKNOWN, 0, "cpu"),
    ("gpu", OF_TORCHRUN, 4, "no device 'gpu'"),
]


@pytest.mark.parametrize(("given", "place", "num_gpus", "expected"), DEVICES, ids=str)
def test_an_environment_gives_a_device_or_one_clear_error(given, place, num_gpus, expected):
    def chosen() -> torch.device:
        return choose_device(given, place, cuda_available=num_gpus > 0, device_count=num_gpus)

    if " " not in expected:
        assert str(chosen()) == expected
        return
    with pytest.raises(PlanError) as caught:
        chosen()
    assert caught.value.what.startswith(expected)
    assert caught.value.fix
    assert caught.value.where


def test_a_driver_without_a_device_is_the_cpu_and_no_error():
    assert choose_device(None, UNKNOWN, cuda_available=False, device_count=8) == torch.device("cpu")


LIMITED = """
import resource
from runtime.distributed.this_host import check_host
for soft, hard in ((20, 80), (20, 32)):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        check_host()
        print(resource.getrlimit(resource.RLIMIT_NOFILE))
    except Exception as error:
        print(error)
"""


def test_a_directory_whose_sockets_would_have_too_long_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_host.util, "get_temp_dir", lambda: f"/{'d' * this_host.MOST_BYTES}")
    with pytest.raises(PlanError, match="has a path of 81 bytes, and a socket in it takes at most 80") as caught:
        launch(print, 1)
    assert caught.value.where == "TMPDIR"


@pytest.mark.thorough
def test_the_limit_of_open_files_is_raised_or_refused() -> None:
    raised, what, at, fix = python("-c", LIMITED).stdout.splitlines()
    assert raised == "(80, 80)"
    assert what == "a process may have 32 files open, and ranks need 64 or more"
    assert at == "  at:  the limit of open files"
    assert "`ulimit -n 1024`" in fix
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 64


def test_a_host_without_its_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_host, "HOST", "192.0.2.1")  # kept for documentation: no host has it
    with pytest.raises(PlanError, match="ranks of one host reach each other over") as caught:
        launch(print, 1)
    assert "ip link set lo up" in caught.value.fix
    with pytest.raises(PlanError, match="ranks of one host reach each other over"):  # before the model is built
        compare_memory("nowhere.py:build", "examples/gpt.yaml")
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match="to which nothing can connect"):
        this_host.stay_on_one_host()
