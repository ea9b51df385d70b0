"""The stops of vLLM's busy loop: where it waits for messages or a result, or would plan twice in one step."""

from __future__ import annotations

from typing import Any, Final

from vllm.v1.engine import EngineCoreRequestType

from scripted.sdk.live.stops import HeldQueue, LoopStops

_ENDING: Final = ("WAKEUP", "EXECUTOR_FAILED")


class VllmStops(LoopStops):
    """Stops ``EngineCoreProc.run_busy_loop``.

    ``plans`` has the plans with their batch numbers; ``outputs`` go to the front end; ``aborted`` are the requests that
    the scheduler aborted.
    """

    def __init__(self, core: Any) -> None:
        super().__init__(lambda item: item[0].name in _ENDING)
        self.aborts = HeldQueue(self.gate, lambda _: False)
        self.plans: list[tuple[int, Any]] = []
        self.outputs: list[Any] = []
        self.aborted: list[str] = []
        self._has_planned = False
        self._core = core
        while not core.input_queue.empty():
            self.inbox.put(core.input_queue.get_nowait())
        core.input_queue, core.aborts_queue = self.inbox, self.aborts
        self._follow_outputs()
        self._follow_scheduler()
        self._stop_before_plans()
        self._stop_at_results()

    def wake(self) -> None:
        self.inbox.wake((EngineCoreRequestType.WAKEUP, None))

    def begin_step(self) -> None:
        self._has_planned = False
        self.plans, self.outputs, self.aborted = [], [], []

    def _follow_outputs(self) -> None:
        queue = self._core.output_queue
        put = queue.put_nowait

        def put_nowait(item: Any) -> None:
            if isinstance(item, tuple):
                self.outputs.append(item[1])
            put(item)

        queue.put_nowait = put_nowait

    def _follow_scheduler(self) -> None:
        scheduler = self._core.scheduler
        schedule, finish = scheduler.schedule, scheduler.finish_requests

        def following_schedule(*args: Any, **kwargs: Any) -> Any:
            plan = schedule(*args, **kwargs)
            self._has_planned = True
            if plan.total_num_scheduled_tokens:
                self.batches += 1
            self.plans.append((self.batches, plan))
            return plan

        def following_finish(*args: Any, **kwargs: Any) -> Any:
            ended = finish(*args, **kwargs)
            self.aborted += [request.request_id for request in ended]
            return ended

        scheduler.schedule, scheduler.finish_requests = following_schedule, following_finish

    def _stop_before_plans(self) -> None:
        core, own = self._core, self._core._process_input_queue  # noqa: SLF001 - where vLLM's loop takes messages

        def process_input_queue() -> None:
            if self._has_planned:
                self.gate.stop_at("step")
            own()

        core._process_input_queue = process_input_queue  # noqa: SLF001

    def _stop_at_results(self) -> None:
        executor = self._core.model_executor
        execute = executor.execute_model

        def execute_model(plan: Any, non_block: bool = False) -> Any:
            future = execute(plan, non_block=non_block)
            if not plan.total_num_scheduled_tokens or not non_block:
                return future
            return _Result(future, self.batches, self)

        executor.execute_model = execute_model


class _Result:
    """A result from vLLM's executor, which the loop gets once the script releases it."""

    def __init__(self, future: Any, batch_id: int, stops: VllmStops) -> None:
        self._future = future
        self._batch_id = batch_id
        self._stops = stops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._future, name)

    def result(self, timeout: float | None = None) -> Any:
        self._stops.await_release(self._batch_id)
        return self._future.result(timeout)
