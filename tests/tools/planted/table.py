"""Every fault by its name, with the seed of a case that finds it."""

from tests.tools.planted import context, data_parallel, experts, scales, schedule, tensor_parallel
from tests.tools.planted.fault import Fault

FAULTS: dict[str, Fault] = (
    tensor_parallel.FAULTS | data_parallel.FAULTS | context.FAULTS | experts.FAULTS | scales.FAULTS | schedule.FAULTS
)
