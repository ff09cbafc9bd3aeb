"""The synchronizer: keeps plan, buffers, residuals and statistics between steps."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import zlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

from numpy.typing import NDArray

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.codecs import Values
from asyncpar.collectives.call import cancel_reason
from asyncpar.collectives.communicator import Communicator, refuse_elastic, step_meter
from asyncpar.core.concurrency.tasks import CleanTaskGroup, off_loop
from asyncpar.core.config.parallel import RankMapping, ThreeDParallelismConfig
from asyncpar.core.config.placement import is_frozen
from asyncpar.core.observe.records import EventState
from asyncpar.core.observe.reported import reported
from asyncpar.errors import NonFiniteValue, PeerError, UsageError
from asyncpar.gradsync import layout_cache
from asyncpar.gradsync.choice import Resolved
from asyncpar.gradsync.config import GradientBucketingConfig, GradientCompressionConfig, NonFinitePolicy
from asyncpar.gradsync.device_sums import check_staged
from asyncpar.gradsync.early_update import EarlyUpdate, UpdateFeed, check_update
from asyncpar.gradsync.groups import HostGroups, Keys, SyncGroups
from asyncpar.gradsync.layout import BucketLayout
from asyncpar.gradsync.layout_cache import LayoutCache, SyncSettings, take_final_of
from asyncpar.gradsync.plan import (
    Accumulation,
    Gradients,
    GradientTree,
    HasGradient,
    HasParameters,
    Parameters,
    check_final,
    frozen_in,
    listed,
    parameters_by_name,
    spec_of,
    trained,
)
from asyncpar.gradsync.schemes.device import HostMirrors
from asyncpar.gradsync.settings_cache import SettingsCache, StepTerms, can_repeat
from asyncpar.gradsync.statistics import StepOutcome, SyncMemory, SyncStatistics, SyncTraffic
from asyncpar.gradsync.step import (
    BucketFlow,
    FlowSettings,
    StepRun,
    SyncStep,
    ThreadTurns,
    first_error,
    propose,
    propose_to_measure,
    refuse,
)
from asyncpar.gradsync.time_limit import TimeLimit
from asyncpar.gradsync.tuned_steps import StepTuning
from asyncpar.gradsync.tuning import TuningConfig, TuningOutcome


class GradientSynchronizer:
    """Makes the gradients of all replicas equal to their mean.

    ``communicator`` joins all ranks of ``config``.  ``name`` distinguishes synchronizers that share a communicator: it
    belongs to one of them until that is closed or collected, and a second use raises ``UsageError``.  All ranks run the
    same steps in the same order.  Parameters with a ``placement`` are also reduced over tensor-parallel ranks, where
    they are replicated, and over the first and the last stage, where they are tied, in that order and before the
    replicas.  Those that are frozen (``requires_grad`` is false, on all ranks alike) take no part, and keep their
    residuals.  ``when_not_finite`` is the policy for NaN and infinity.  A step in which a rank does nothing for
    ``config.communication_timeout_ms`` ends with ``PeerTimeout``; if that is not given, the ``timeout`` of
    ``communicator`` applies.  Ranks with different limits get ``SettingsDiffer`` in the first step.

    Gradients may be arrays on this rank's CUDA device: NCCL averages their buckets on separate streams, after the work
    that computes them, and their streams wait for the result.  This is supported for data parallelism alone.  Codecs
    that the gradients' library has as kernels work on the device; with others gradients go through pinned host memory
    and are otherwise treated like gradients on the host.

    ``hosts`` are groups of replicas of equal size that the hierarchical strategy uses instead of actual hosts: buckets
    are added inside each group, reduced between the first ranks of all groups, and distributed inside.

    ``bucketing`` and ``compression`` are the settings of buckets and of the codec.  With ``tuning`` ranks search for
    the fastest bucket size, algorithm and message size during training (see ``TuningConfig``); only for data
    parallelism with gradients on the host.  Sums of floats may then differ in their last bits from step to step and
    from run to run, but never between ranks.
    """

    def __init__(
        self,
        config: ThreeDParallelismConfig,
        rank_mapping: RankMapping,
        *,
        communicator: Communicator,
        bucketing: GradientBucketingConfig | None = None,
        compression: GradientCompressionConfig | None = None,
        when_not_finite: NonFinitePolicy = NonFinitePolicy.ABORT,
        name: str = "gradients",
        hosts: HostGroups | None = None,
        tuning: TuningConfig | None = None,
    ) -> None:
        self._claimed = communicator
        self._limit = TimeLimit(communicator, config, name)
        self._groups = SyncGroups.of(config, rank_mapping, self._limit.communicator)
        self._bucketing = bucketing or GradientBucketingConfig()
        self._policy = NonFinitePolicy(when_not_finite)
        if self._policy is NonFinitePolicy.DROP and config.world_size != config.dp_size:
            raise UsageError("when_not_finite: drop is for data parallelism alone, use skip_step or abort")
        settings = SyncSettings(
            groups=self._groups,
            rank_order=config.rank_order(),
            hosts=hosts,
            bucketing=self._bucketing,
            strategy=config.comm_strategy,
            policy=self._policy,
        )
        self._layouts = LayoutCache(settings, compression or GradientCompressionConfig())
        self._accumulation = Accumulation()
        self._statistics = SyncStatistics()
        self._is_stepping = False
        self._threads = max(1, (os.cpu_count() or 1) // 2)  # cached: it takes 0.3 ms
        self._keys = Keys(name)
        self._settings_cache = SettingsCache(self._groups, self._keys)
        self._drawn_before = 0
        self._name = name
        self._is_closed = False
        self._strategy = config.comm_strategy
        self._tuning = self._make_tuning(tuning)
        self._meter = step_meter(communicator, name)
        refuse_elastic(communicator, type(self).__name__)
        communicator.claim(name, self)

    @classmethod
    def data_parallel(
        cls,
        communicator: Communicator,
        *,
        bucketing: GradientBucketingConfig | None = None,
        compression: GradientCompressionConfig | None = None,
        when_not_finite: NonFinitePolicy = NonFinitePolicy.ABORT,
        name: str = "gradients",
        tuning: TuningConfig | None = None,
    ) -> Self:
        """Return a synchronizer for ranks of ``communicator`` that each hold a replica of the whole model."""
        config = ThreeDParallelismConfig(dp_size=communicator.size)
        made = cls(
            config,
            RankMapping(config, communicator.rank),
            communicator=communicator,
            bucketing=bucketing,
            compression=compression,
            when_not_finite=when_not_finite,
            name=name,
            tuning=tuning,
        )
        made._limit.skip_comparison()
        return made

    # -- steps -------------------------------------------------------------------------------------------------------

    async def synchronize_gradients(self, model_shards: HasParameters | GradientTree) -> StepOutcome:
        """Replace every gradient by its mean over all replicas, and return the outcome of the step.  See ``step``.

        ``model_shards`` has ``parameters()``, or is a plain dictionary of gradients: ``{"w": gw, "layer": {"b": gb}}``,
        whose arrays are overwritten.
        """
        gradients = model_shards if isinstance(model_shards, Mapping) else model_shards.parameters()
        async with self.step(gradients) as step:
            pass
        return step.outcome

    @asynccontextmanager
    async def step(self, parameters: Gradients, *, update: EarlyUpdate | None = None) -> AsyncIterator[SyncStep]:
        """Synchronize gradients while they are still being computed.

        ``parameters`` are objects with a name and a gradient, or a plain dictionary of gradients, whose arrays may be
        filled in the block; in nested ones the name of a gradient is its path, such as ``layer/b``.

        Inside the block, call ``ready(name)`` for each gradient that is final; leaving the block means that all are,
        and waits for the last bucket.  Only then are all gradients replaced by their mean: any earlier failure, on any
        rank, raises on every rank and leaves gradients and residuals unchanged.  When a bucket fails, the block is
        cancelled at once; a worker thread that computes in it runs to its end, and its reports are ignored.  A rank
        that is cancelled after all ranks have completed their buckets has the mean, like the others.

        Raises ``UsageError`` if ranks differ in their parameters or settings, or a gradient has another shape or dtype
        than in earlier steps, ``NonFiniteValue`` naming ranks and parameters (see ``NonFinitePolicy``), and
        ``PeerError``.  After the first step buckets follow the order in which gradients became final in it.

        ``update`` receives means as they become known, once the block is left, while the rest is in flight, so an
        element-wise optimizer has updated almost everything when the last bytes arrive.  If the step fails or is
        skipped, its ``undo`` is called.  Ranks need not agree on ``update``.  It is supported neither with
        ``when_not_finite="drop"`` nor for gradients on devices.
        """
        self._check_idle("step")
        if self._is_closed:
            raise UsageError("step: this synchronizer is closed")
        self._is_stepping = True
        feed: UpdateFeed | None = None
        try:
            self._keys.begin_step()
            self._settings_cache.begin_step()
            self._meter.begin(self.steps)
            by_name, layout = await self._prepare(parameters, has_update=update is not None)
            take_final = take_final_of(layout, by_name)
            step = SyncStep(
                layout.plan,
                frozen=layout.frozen,
                overlap=self._bucketing.overlap_communication,
                take_final=take_final,
                all_final=self._meter.waits,
            )
            before = SyncTraffic.read(layout.communicators)
            feed = None if update is None else UpdateFeed(update, by_name, flows=len(layout.schemes))
            terms = StepTerms(
                layout=layout.digest,
                micro_steps=self._accumulation.micro_steps + 1,
                is_observed=self._layouts.is_observed,
                drawn_before=self._drawn_before,
            )
            run = self._make_run(layout, by_name, feed, terms)
            as_views = self._bucketing.gradient_as_bucket_view
            async with self._running(run, step):
                yield step
                check_final(layout.plan.specs, by_name, as_views=as_views)
            if not self._skips(step.outcome):
                if feed is not None:
                    feed.commit()
                step.record.count(SyncTraffic.read(layout.communicators) - before, least_bytes=layout.least_bytes)
                await self._commit(step, run, by_name, layout.mirrors)
            self._settings_cache.succeed(terms if run.order is None and can_repeat(layout) else None)
        except BaseException:
            self._keys.epoch += 1
            self._settings_cache.fail()
            self._meter.end(EventState.FAILED)
            raise
        finally:
            self._is_stepping = False
            self._settings_cache.end_step()
            self._meter.end()
            if feed is not None:
                await feed.undo()

    @asynccontextmanager
    async def _running(self, run: StepRun, step: SyncStep) -> AsyncIterator[None]:
        """Run the buckets of ``step`` during the block and after it; on failure here, abort the step on all ranks."""
        with cancel_reason() as why:
            try:
                with first_error():
                    async with CleanTaskGroup() as tasks:
                        run.begin(step, tasks)
                        self._meter.works()
                        try:
                            yield
                        except BaseException as error:
                            why.take(error)  # before the group cancels running tasks
                            raise
                        run.finish(step)
                await run.end(step)
            except BaseException as error:
                step.close()
                if run.is_refused:
                    self._start_over()
                else:
                    why.take(error)
                    run.close()
                raise

    async def reserve(self, parameters: Gradients) -> None:
        """Allocate the buffers for ``parameters`` before the first step, to make their size known.  Nothing is sent.

        With the codec ``"auto"``, which is chosen in the first step, that step allocates them.
        """
        self._check_idle("reserve")
        if not self._layouts.must_measure:
            resolved = await self._layouts.resolve("reserve")
            by_name = parameters_by_name(parameters)
            self._layouts.lay_out(trained(by_name), resolved, frozen=frozen_in(by_name))

    def accumulate(self, model_shards: HasParameters | GradientTree) -> None:
        """Accumulate the gradients of a micro-step and zero them; the next step averages over micro-steps, too.

        Call it after each micro-step but the last, whose gradients the step itself takes: each of ``k`` micro-steps has
        the weight ``1 / k``.  Sums have the gradients' shapes and dtypes; two-byte dtypes are added in float32.
        """
        self._check_idle("accumulate")
        if self._bucketing.gradient_as_bucket_view:
            raise UsageError("accumulate: gradients that are views of buckets add up where they are; do not zero them")
        gradients = model_shards if isinstance(model_shards, Mapping) else model_shards.parameters()
        self._accumulation.add([parameter for parameter in listed(gradients) if not is_frozen(parameter)])

    def close(self) -> None:
        """Release the name for another synchronizer and take no more steps; state and statistics stay readable."""
        self._claimed.release(self._name, self)
        self._layouts.release()
        self._is_closed = True

    def restart(self, number: int) -> None:
        """Start over after a failure that kept some ranks from a ``step`` that others have begun; residuals are kept.

        To be called on all ranks, with the same ``number``, larger than any before.
        """
        self._check_idle("restart")
        self._limit.restart(number)
        self._keys.restart(number)
        self._settings_cache.restart()
        self._start_over()
        self._accumulation.clear()

    # -- state -------------------------------------------------------------------------------------------------------

    def get_sync_stats(self) -> SyncStatistics:
        """Return a copy of the statistics so far."""
        return dataclasses.replace(
            self._statistics, residual_norm=self._layouts.residual_norm(), memory_bytes=self.get_memory_usage().total
        )

    def get_memory_usage(self) -> SyncMemory:
        """Return the bytes of buckets, residuals and accumulated gradients that are held on this rank now."""
        return SyncMemory(
            buffers=self._layouts.nbytes,
            residuals=self._layouts.residual_nbytes,
            accumulation=self._accumulation.nbytes,
        )

    def codec_table(self) -> str:
        """Return the measurements, predictions and choice of the codec ``"auto"``, in aligned columns.

        Empty before the first step, inside a single host, with other codecs, and where the choice was restored.
        """
        return self._layouts.codec_table

    def update_compression_config(self, compression: GradientCompressionConfig) -> None:
        """Use ``compression`` from the next step on; to be called on all ranks.

        Residuals are kept if the new setting uses error feedback, else dropped.
        """
        self._check_idle("update_compression_config")
        self._layouts.change(compression)
        self._settings_cache.invalidate()
        self._restart_tuning()

    def update_bucketing_config(self, bucketing: GradientBucketingConfig) -> None:
        """Use ``bucketing`` from the next step on; to be called on all ranks.  Residuals are kept."""
        self._check_idle("update_bucketing_config")
        self._layouts.rebucket(bucketing)
        self._bucketing = bucketing
        self._settings_cache.invalidate()
        self._restart_tuning()

    def update_tuning_config(self, tuning: TuningConfig | None) -> None:
        """Tune by ``tuning`` from the next step on, from scratch; None: use the unchanged settings.

        To be called on all ranks.  Raises ``UsageError``, with nothing changed, for a pin that cannot run here.
        """
        self._check_idle("update_tuning_config")
        self._tuning = self._make_tuning(tuning)
        self._settings_cache.invalidate()
        self._layouts.tune(None)

    def tuning_outcome(self) -> TuningOutcome | None:
        """Return the best choice so far, as a pin, and the cost of the search.

        None without ``tuning``, and before the first step.
        """
        return None if self._tuning is None else self._tuning.outcome

    def tuning_table(self) -> str:
        """Return the bucket sizes and algorithms that were tried, the waits of steps with them, and the cost.

        Empty without ``tuning``, and before the first step.
        """
        return "" if self._tuning is None else self._tuning.table()

    def clear_buffers(self) -> None:
        """Free all buffers and forget residuals, accumulated gradients and the state of codecs.

        The next step makes new ones.  To be called on all ranks.
        """
        self._check_idle("clear_buffers")
        self._layouts.clear()
        self._settings_cache.invalidate()
        self._restart_tuning()
        self._accumulation.clear()

    def residuals(self) -> dict[str, Values]:
        """Return a copy of each parameter's residual, flat, by name; empty without error feedback."""
        return self._layouts.residuals()

    def restore_residuals(self, residuals: Mapping[str, Values]) -> None:
        """Continue with ``residuals`` of an earlier run of this rank; to be called on all ranks, before a step."""
        self._check_idle("restore_residuals")
        self._layouts.restore_residuals(residuals)
        self._settings_cache.invalidate()

    def owe(self, lacking: Mapping[str, Values]) -> list[str]:
        """Compensate for ``lacking`` in the next steps, replacing current residuals; to be called on all ranks.

        ``lacking`` is the amount by which means were too small in another layout of ranks: flat, by parameter, equal on
        all replicas.  Returns the parameters that cannot be compensated because nothing is compressed with error
        feedback here.
        """
        self._check_idle("owe")
        self._settings_cache.invalidate()
        return self._layouts.owe(lacking)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return a copy of the state of error feedback and codecs on this rank, vectors by name, for checkpoints.

        It belongs to parameters, not to buckets, so it survives another plan.  The order in which gradients became
        final, which decides on buckets, is part of it, and so is the choice of the codec ``"auto"``.
        """
        return self._layouts.state()

    @property
    def replicas(self) -> Communicator:
        """The group of the ranks that hold the same parameters as this one, over which gradients are averaged."""
        return self._groups.replicas

    @property
    def steps(self) -> int:
        """The number of the last step, which seeds the random numbers of codecs."""
        return self._keys.steps + self._drawn_before

    def restore(self, state: Mapping[str, NDArray[Any]], *, steps: int | None = None) -> None:
        """Continue with the ``state`` of an earlier run of this rank; to be called on all ranks, before a step.

        With the ``steps`` of that run, on as many ranks with the same gradients, the next steps give the same bits.
        """
        self._check_idle("restore")
        self._layouts.restore(state)
        self._settings_cache.invalidate()
        if steps is not None:
            self._drawn_before = steps - self._keys.steps

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _prepare(self, parameters: Gradients, *, has_update: bool) -> tuple[dict[str, HasGradient], BucketLayout]:
        """Return the parameters that are not frozen, and the layout for them.

        An error on this rank alone is reported to the others, which then raise, too.
        """
        try:
            await self._limit.compare()
            if self._layouts.must_measure:
                self._settings_cache.announce_change()
                comparison = propose_to_measure(self._groups, self._keys)
                self._keys.has_measured = True
                self._keys.adopt(await comparison.run())
            resolved = await self._layouts.resolve(f"{self._keys.rare}/auto")
            given = parameters_by_name(parameters)
            by_name = trained(given)
            self._accumulation.check(by_name)
            self._tune(by_name, resolved)
            layout = self._layouts.lay_out(by_name, resolved, frozen=frozen_in(given))
            if layout.mirrors is not None:
                check_staged(self._accumulation.sums)
            if has_update:
                check_update(policy=self._policy, layout=layout)
            return by_name, layout
        except SettingsDiffer:
            self._start_over()
            raise
        except UsageError as error:
            await self._refuse(error)
            raise
        except BaseException as error:
            self._settings_cache.announce_change()
            refuse(self._groups, self._keys, error).close()
            raise

    async def _refuse(self, error: UsageError) -> None:
        """Notify the other ranks that this one cannot take the step."""
        self._settings_cache.announce_change()
        try:
            await refuse(self._groups, self._keys, error).run()
        except SettingsDiffer:
            self._start_over()
        except PeerError as lost:
            error.add_note(f"the other ranks could not be notified: {lost}")

    def _make_run(
        self, layout: BucketLayout, by_name: Parameters, feed: UpdateFeed | None, terms: StepTerms
    ) -> StepRun:
        """Return the run of this step."""
        agreed, mirrors, tuning = asyncio.Event(), layout.mirrors, self._tuning
        settings = FlowSettings(
            groups=self._groups,
            packing=layout_cache.Packing(
                parameters=by_name if mirrors is None else mirrors.parameters,
                fetch=None if mirrors is None else partial(mirrors.fetch, by_name),
                accumulated=self._accumulation.sums,
                micro_steps=terms.micro_steps,
                as_views=self._bucketing.gradient_as_bucket_view,
            ),
            policy=self._policy,
            turns=ThreadTurns(threads=self._threads),
            agreed=agreed,
            step=self._keys.steps,
            feed=feed,
        )

        def make_flows() -> list[BucketFlow]:
            return [
                BucketFlow(
                    scheme,
                    keys=self._keys.bucket(scheme.bucket),
                    place=(self.steps, zlib.crc32(scheme.bucket.shared_name.encode())),
                    settings=settings,
                )
                for scheme in layout.schemes
            ]

        return StepRun(
            partial(
                propose,
                self._groups,
                self._keys,
                layout,
                number=self.steps,
                micro_steps=terms.micro_steps,
                is_observed=terms.is_observed,
                tuning="" if tuning is None else tuning.line,
            ),
            make_flows,
            self._groups,
            keys=self._keys,
            agreed=agreed,
            observes=self._bucketing.overlap_communication and not self._layouts.is_observed,
            feed=feed,
            tuning=tuning,
            cache=self._settings_cache if self._settings_cache.holds_for(terms) else None,
        )

    def _skips(self, outcome: StepOutcome) -> bool:
        """Return whether to skip the step.  Raises ``NonFiniteValue`` unless the policy is to skip."""
        if not outcome.text:
            return False
        if self._policy is not NonFinitePolicy.SKIP_STEP:
            raise NonFiniteValue(f"gradients: expected finite numbers, but {outcome.text}")
        outcome.is_skipped = True
        self._statistics.total_skipped_steps += 1
        self._accumulation.clear()
        return True

    async def _commit(self, step: SyncStep, run: StepRun, by_name: Parameters, mirrors: HostMirrors | None) -> None:
        """Write gradients back: nothing can fail any more, and other ranks do so, too, even if this one is
        cancelled.
        """
        try:
            await off_loop(partial(self._write, run, by_name, mirrors), nbytes=run.nbytes)
        finally:
            for flow in run.flows:
                flow.scheme.commit()
            self._accumulation.clear()
            step.record.add_to(self._statistics)
            reported.gradients = self._statistics.overlap_fraction, self._statistics.compression_ratio_achieved
            if run.order is not None:
                self._layouts.observe(run.order)
            if self._tuning is not None and run.measured is not None:
                self._tuning.observe(run.measured)

    def _write(self, run: StepRun, by_name: Parameters, mirrors: HostMirrors | None) -> None:
        write = layout_cache.unpack_as_views if self._bucketing.gradient_as_bucket_view else layout_cache.unpack
        for flow in run.flows:
            into = by_name if mirrors is None else mirrors.parameters
            write(flow.scheme, into, factor=flow.scheme.factor(flow.outcome.contributors))
        if mirrors is not None:
            mirrors.store(by_name)

    def _make_tuning(self, tuning: TuningConfig | None) -> StepTuning | None:
        if tuning is None:
            return None
        if not self._groups.is_data_parallel_only:
            raise UsageError("tuning: is for data parallelism alone, whose copies all have the same bits; leave it out")
        return StepTuning(tuning, self._groups.replicas)

    def _tune(self, by_name: Parameters, resolved: Resolved) -> None:
        """Use the bucket size and the algorithm of the next step."""
        if self._tuning is not None:
            specs = tuple(spec_of(parameter) for parameter in by_name.values())
            choice = self._tuning.begin(
                specs,
                bucket_size_mb=self._bucketing.bucket_size_mb,
                strategy=self._strategy,
                codec=resolved.settled(sum(spec.count for spec in specs)).codec,
                bucket_bytes=self._layouts.bucket_bytes,
            )
            self._layouts.tune(choice)

    def _start_over(self) -> None:
        self._layouts.start_over()
        self._restart_tuning()

    def _restart_tuning(self) -> None:
        if self._tuning is not None:
            self._tuning.restart()

    def _check_idle(self, what: str) -> None:
        if self._is_stepping:
            raise UsageError(f"{what}: the previous step of this synchronizer is still under way")
