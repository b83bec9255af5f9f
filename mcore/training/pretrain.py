"""The main program around any model: parse, join the job, build, load, train, evaluate, save."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from mcore.config.command_line import spelled_as_flags
from mcore.config.run import Resolved, RunConfig, batch_size_calculator, resolve
from mcore.data.token_budget import BudgetedConversations
from mcore.errors import (
    LostPeerError,
    McoreError,
    NumericsError,
    TransientNumericsError,
)
from mcore.log import get_logger, report_error, warn_alike, warn_ignored
from mcore.num_microbatches_calculator import NumMicroBatchesCalculator
from mcore.pipeline_parallel.executor import ForwardStepFunc
from mcore.signals import SignalWatch, install
from mcore.tokenizers import build_tokenizer
from mcore.topology.collectives import is_loss_of_peer
from mcore.training import checkpointing
from mcore.training.arguments import ExtraArguments, read
from mcore.training.autopilot import Autopilot, build_autopilot
from mcore.training.checkpoint_fit import check_end
from mcore.training.checkpoint_writer import CheckpointWriter
from mcore.training.exits import Exits, forget_workers, tell_workers
from mcore.training.garbage import garbage_collection
from mcore.training.idle_options import idle_options, remarks
from mcore.training.initialize import (
    Launch,
    Runtime,
    finish,
    initialize,
    leave_now,
    read_launch,
)
from mcore.training.logging import RunLog
from mcore.training.loop import Run
from mcore.training.memory_watch import MemoryWatch
from mcore.training.observation import (
    Observation,
    Whereabouts,
    build_profiler,
    build_timers,
)
from mcore.training.options import spellings
from mcore.training.pipeline_profile import PipelineProfile
from mcore.training.places import DataFiles
from mcore.training.prepare import Prepared, prepare
from mcore.training.setup import (
    DatasetsProvider,
    ModelProvider,
    TrainState,
    build_state,
    check_datasets,
    data_sizes,
    follow_data_order,
)
from mcore.training.step import StepFunctions
from mcore.training.token_budget import TokenBudgetCalculator

#: What is wrong is mostly seen by all ranks. Rank 0 says it once and the launcher then ends the
#: others, which wait this long before they speak for themselves.
_OTHERS_WAIT_SECONDS = 3.0

#: Of a run whose numbers cannot be trained on: started again it would come to the same end. It is
#: Megatron's code for a fault that is not transient.
NUMERICS_EXIT_CODE = 17
#: Of one whose numbers were right when computed again: started again it may well go on. Megatron's
#: code for a fault that a restart tells more about.
TRANSIENT_EXIT_CODE = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Providers:
    """What a program supplies about its model and data.

    Attributes:
        datasets: `(config, (train, valid, test) samples) -> three data sets or None`.
        model: `(config, stage) -> module`: the part of the model that a stage holds.
        forward_step: `(data_iterator, model) -> (output, loss_func)`; see
            `mcore.pipeline_parallel`.
    """

    datasets: DatasetsProvider
    model: ModelProvider
    forward_step: ForwardStepFunc


def pretrain(
    datasets_provider: DatasetsProvider,
    model_provider: ModelProvider,
    forward_step: ForwardStepFunc,
    extra_args_provider: ExtraArguments | None = None,
    argv: Sequence[str] | None = None,
    data_files: DataFiles | None = None,
) -> None:
    """Train a model from the command line; the process exits non-zero with one message on an error.

    Args:
        datasets_provider: see `Providers`.
        model_provider: see `Providers`.
        forward_step: see `Providers`.
        extra_args_provider: adds a program's own arguments to the parser.
        argv: command line; that of the process when None.
        data_files: from the data options to the files that have to be there before anything starts,
            `mcore.training.corpus_files` for mcore's own; None = the provider sees to it.
    """
    watch = install()
    launch = Launch(0, 1, 0)
    try:
        launch = read_launch()
        if watch is not None and launch.by_torchrun:
            watch.follow_launcher()
        arguments = read(sys.argv[1:] if argv is None else argv, extra_args_provider)
        launch = read_launch(arguments.get("runtime", "local_rank"))
        prepared = prepare(arguments, launch, data_files)
    except McoreError as error:
        if watch is not None:
            watch.let_signals_kill()
        _refuse(error, launch)
    try:
        run(prepared, launch, Providers(datasets_provider, model_provider, forward_step), watch)
    except LostPeerError as error:
        _leave_after_loss(str(error), launch, watch)
    except McoreError as error:
        if watch is not None:
            watch.let_signals_kill()
        if launch.rank > 0:
            time.sleep(_OTHERS_WAIT_SECONDS)
        report_error(f"rank {launch.rank}: {spelled_as_flags(str(error), spellings())}")
        leave_now(_exit_code(error))
    except RuntimeError as error:
        if not is_loss_of_peer(error):
            raise
        reason = (
            "another rank has ended, and its own message says why; or it was silent for longer "
            f"than --distributed-timeout-minutes ({str(error).splitlines()[0]})"
        )
        _leave_after_loss(reason, launch, watch)
    if watch is not None:
        watch.end()


def run(
    prepared: Prepared, launch: Launch, providers: Providers, watch: SignalWatch | None = None
) -> TrainState:
    """Train, and return what was trained.

    Args:
        prepared: the checked command line.
        launch: what the launcher says.
        providers: model and data.
        watch: the signals of this process, where they are watched.

    Comm: joins the job that the launcher started, unless torch.distributed is initialised already.

    Raises:
        McoreError: data, checkpoint or device that cannot be used.
    """
    config = prepared.config
    runtime = initialize(config, launch)
    exits = Exits(config, runtime, watch)
    tell_workers(config, runtime, watch)
    try:
        return _run_told(prepared, launch, providers, runtime, exits, watch)
    finally:
        forget_workers(config, runtime)


def _run_told(
    prepared: Prepared,
    launch: Launch,
    providers: Providers,
    runtime: Runtime,
    exits: Exits,
    watch: SignalWatch | None,
) -> TrainState:
    config = prepared.config
    _tell_notes(prepared, runtime)
    timers, profiler = build_timers(config, runtime), build_profiler(config, runtime)
    began = time.perf_counter()
    tokenizer = build_tokenizer(config.tokenizer)
    config = dataclasses.replace(
        config, tokenizer=dataclasses.replace(config.tokenizer, vocab_size=tokenizer.vocab_size)
    )
    resolved = resolve(config, launch.world_size)
    sizes = data_sizes(config, resolved)
    datasets = providers.datasets(config, sizes)
    check_datasets(datasets, sizes, config)
    data_done = time.perf_counter()
    memory = MemoryWatch(config, launch.world_size, runtime)
    state = build_state(config, resolved, runtime, providers.model)
    memory.tell_prediction(state.chunks)
    timeout = timedelta(minutes=config.runtime.distributed_timeout_minutes)
    writer = CheckpointWriter(config.checkpoint, timeout=timeout)
    loaded: Path | None = None
    if prepared.loads:
        loaded = checkpointing.load(state, config, runtime.ctx, writer.found_damaged)
    setup_done = time.perf_counter()
    if not config.training.skip_train:
        check_end(state.iteration, resolved.train_iters)
        follow_data_order(state, datasets[0])
    log = RunLog(config, resolved, runtime, state.iteration, timers)
    log.phases(
        {
            "model-and-optimizer-setup": setup_done - data_done,
            "train/valid/test-data-iterators-setup": data_done - began,
        }
    )
    log.progress("started", state)
    profile = _profile(config, runtime)
    whereabouts = None if watch is None else Whereabouts(watch.notice)
    observation = Observation(timers, profiler, profile, whereabouts)
    batch_sizes = _batch_sizes(config, resolved, datasets[0])
    steps = _steps(providers.forward_step, config, resolved, runtime, batch_sizes, observation)
    autopilot = build_autopilot(config, resolved, runtime, steps, datasets)
    training = Run(
        config, resolved, runtime, state, steps, datasets, log, writer, memory, exits, autopilot
    )
    try:
        _train(training, loaded, profile)
    finally:
        profiler.close()
        log.close()
        autopilot.close()
    writer.close()
    if watch is not None:
        watch.ignore_peers()
    finish(runtime)
    return state


def _train(training: Run, loaded: Path | None, profile: PipelineProfile | None) -> None:
    """All iterations, and what comes after the last."""
    config, state = training.config, training.state
    if loaded is not None:
        training.resume_from(loaded)
    try:
        if not config.training.skip_train:
            with garbage_collection(config.runtime):
                training.train()
        if profile is not None:
            profile.close()
        if state.iteration == training.resolved.train_iters or config.training.skip_train:
            training.finish()
    except BaseException as error:
        training.writer.abandon()
        if isinstance(error, NumericsError):
            _tell_end(training.autopilot, error, state)
        raise


def _steps(
    forward_step: ForwardStepFunc,
    config: RunConfig,
    resolved: Resolved,
    runtime: Runtime,
    batch_sizes: NumMicroBatchesCalculator,
    observation: Observation,
) -> StepFunctions:
    has_policy = config.stability.loss_spike_policy != "off"
    return StepFunctions(
        forward_step,
        resolved,
        runtime,
        batch_sizes,
        observation,
        looks_for_nan=has_policy or config.training.check_for_nan_in_loss_and_grad,
        notes_gradients=has_policy or not config.optimizer.scales_dynamically,
    )


def _leave_after_loss(reason: str, launch: Launch, watch: SignalWatch | None) -> None:
    if watch is not None:
        watch.follow_peer()
        account = watch.account_of_peers(seconds=1.0)
        reason += f"; {account}" if account else ""
    report_error(f"rank {launch.rank}: {reason}")
    leave_now(1)


def _tell_end(autopilot: Autopilot, error: NumericsError, state: TrainState) -> None:
    """Name the batch that ends the run; that it cannot be named must not hide why the run ends."""
    try:
        autopilot.tell_end(error, state)
    except (McoreError, OSError) as failure:
        get_logger().error("the batch that ends the run could not be told: %s", failure)


def _tell_notes(prepared: Prepared, runtime: Runtime) -> None:
    config = prepared.config
    for note in prepared.notes:
        get_logger().info("note: %s", note)
    if runtime.is_writer and config.checkpoint.load is not None and not prepared.loads:
        get_logger().warning(
            "THE RUN STARTS NEW: --load %s is the --save directory and holds no checkpoint yet",
            config.checkpoint.load,
        )
    on_cpu = runtime.device.type == "cpu"
    for option, reason in idle_options(config, runtime.ctx.dp_cp.size, on_cpu=on_cpu):
        warn_ignored(option, reason)
    for remark in remarks(config):
        warn_alike(remark)


def _batch_sizes(config: RunConfig, resolved: Resolved, data: object) -> NumMicroBatchesCalculator:
    if isinstance(data, BudgetedConversations):
        return TokenBudgetCalculator(data, resolved.global_batch_size, resolved.data_parallel_size)
    return batch_size_calculator(config.training, resolved.data_parallel_size)


def _profile(config: RunConfig, runtime: Runtime) -> PipelineProfile | None:
    path = config.pipeline.profile_pipeline
    return None if path is None or runtime.ctx.pp.size == 1 else PipelineProfile(path, runtime)


def _exit_code(error: McoreError) -> int:
    if isinstance(error, TransientNumericsError):
        return TRANSIENT_EXIT_CODE
    return NUMERICS_EXIT_CODE if isinstance(error, NumericsError) else 1


def _refuse(error: McoreError, launch: Launch) -> None:
    """Leave before any process group exists.

    All ranks see the same error as a rule, and rank 0 tells it. On another machine, or in a folder
    of its own, a rank may be the only one: it speaks if nobody has ended it meanwhile.
    """
    if launch.rank == 0:
        report_error(str(error))
    else:
        time.sleep(_OTHERS_WAIT_SECONDS * (1 if launch.local_rank == 0 else 4))
        report_error(f"rank {launch.rank}: {error}")
    sys.exit(2)
