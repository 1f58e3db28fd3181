from passes.errors import PlanError as PlanError
from passes.errors import RunError as RunError
from passes.rules.own import rule as rule
from planner.api import capture as capture
from planner.api import find_layouts as find_layouts
from planner.api import plan as plan
from planner.capture.model.meta_init import meta_parameters as meta_parameters
from planner.capture.own_loss import combine as combine
from planner.capture.own_loss import with_loss as with_loss
from planner.captured import Captured as Captured
from planner.frozen_plan import Plan as Plan
from planner.pipeline.schedule import build_schedule as build_schedule
from planner.pipeline.simulate import parse_schedule as parse_schedule
from planner.spec.spec import Spec as Spec
from runtime.distributed.launch import RankError as RankError
from runtime.engine.engine import Engine as Engine
from runtime.report.step_report import StepReport as StepReport

__version__: str
__all__: list[str]
