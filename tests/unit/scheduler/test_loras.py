"""LoRAs in the scheduler: what is loaded and dropped when, who waits, and what an unload sees."""

from __future__ import annotations

import msgspec
import pytest
from simulated_engine import SimulatedEngine, alone, generate, prompt

from engine.core.audit import audit
from engine.core.errors import IntegrityError
from engine.core.messages import (
    Abort,
    ContinueGeneration,
    FinishReason,
    FlushCache,
    Generate,
    LoadLora,
    LoraRead,
    PauseGeneration,
    PauseMode,
    PipelineFailed,
    RefusalKind,
    UnloadLora,
    UpdateWeights,
)
from engine.core.plan import ForwardMode, LoraChange, LoraOrder, LoraUpdate

ONE = {"max_loras": 1, "lora": "x=embedded-lora:1,y=embedded-lora:2"}
FLAGSHIP = {"pp_size": 4, "pp_async_depth": 2, "chunked_prefill_size": 64}
PROMPT = prompt(64)


def with_lora(rid: str, lora: str | None, ids: tuple[int, ...] = PROMPT, new: int = 4, priority: int = 0) -> Generate:
    return msgspec.structs.replace(generate(rid, ids, new, priority=priority), lora=lora)


def load(name: str, seed: int = 1) -> LoadLora:
    return LoadLora(call_id=f"load-{name}-{seed}", name=name, path=f"embedded-lora:{seed}")


def changes(engine: SimulatedEngine) -> list[LoraChange]:
    return [one.change for one in engine.microbatches if isinstance(one, LoraUpdate)]


def test_an_engine_without_places_holds_no_loras() -> None:
    engine = SimulatedEngine()
    engine.drain(load("x"), UnloadLora(call_id="u", name="x"), with_lora("r", "x"))
    assert "--max-loras" in engine.answers["load-x-1"].message
    assert "--max-loras" in engine.answers["u"].message
    assert engine.life("r").refusal is RefusalKind.NOT_FOUND
    assert engine.microbatches == []


def test_those_of_the_start_are_loaded_when_they_are_asked_for() -> None:
    engine = SimulatedEngine(**ONE)
    assert engine.scheduler.stats().loras_resident == 0
    tokens = [engine.run(with_lora("r", lora))[0] for lora in (None, "x", "y", "x")]
    assert tokens[1] == tokens[3]
    assert len({tuple(said) for said in tokens}) == 3
    assert changes(engine) == [
        LoraChange("x", 1, "embedded-lora:1"),
        LoraChange("y", 2, "embedded-lora:2", drop=1),
        LoraChange("x", 3, "embedded-lora:1", drop=2),
    ]


def test_kv_of_another_load_is_not_found() -> None:
    """C11: not that of another LoRA, of the model, or of the same LoRA before it made room."""
    engine = SimulatedEngine(**ONE)
    for lora in (None, "x", "y", "x"):
        engine.run(with_lora("r", lora))
    assert engine.scheduler.stats().cached_tokens == 0
    engine.run(with_lora("r", "x"))
    assert engine.scheduler.stats().cached_tokens == 48
    assert not engine.pipeline.corruptions


def test_a_load_is_launched_beside_others() -> None:
    engine = SimulatedEngine(**FLAGSHIP, max_loras=1)
    engine.step(generate("r", prompt(125), 4))
    assert engine.step(load("x")).loras == (LoraOrder(1, "x", "embedded-lora:1"),)
    assert engine.microbatches[-1].mode is ForwardMode.PREFILL
    engine.step()
    assert engine.microbatches[-1].mode is ForwardMode.LORA
    engine.drain()
    assert engine.answers["load-x-1"].message == "Success: LoRA adapter 'x' added successfully."
    assert engine.life("r").tokens == alone(generate("r", prompt(125), 4))


def test_calls_are_launched_one_at_a_time_in_their_order() -> None:
    engine = SimulatedEngine(**FLAGSHIP, max_loras=2)
    engine.step(load("x"), load("y", 2), load("x", 3))
    assert "already been loaded" in engine.answers["load-x-3"].message
    engine.drain()
    assert [change.name for change in changes(engine)] == ["x", "y"]
    assert engine.scheduler.stats().loras_resident == 2


def test_a_load_without_a_place_reads_and_checks() -> None:
    engine = SimulatedEngine(**ONE)
    engine.step(with_lora("r", "x", new=20))
    for _ in range(4):
        engine.step(completions=1)
    engine.step(load("z", 3), completions=1)
    engine.step(completions=1)
    assert changes(engine)[-1] == LoraChange("z", 2, "embedded-lora:3", drop=2)
    engine.drain()
    assert engine.answers["load-z-3"].ok
    assert engine.scheduler.stats().loras_resident == 1
    assert engine.run(with_lora("s", "z"))[0] != engine.run(with_lora("t", None))[0]


def test_the_one_that_was_used_longest_ago_makes_room() -> None:
    engine = SimulatedEngine(max_loras=2, lora="x=embedded-lora:1,y=embedded-lora:2,z=embedded-lora:3")
    for lora in ("x", "y", "x", "z"):
        engine.run(with_lora("r", lora))
    assert changes(engine)[-1] == LoraChange("z", 3, "embedded-lora:3", drop=2)


def test_a_lora_that_a_request_before_waits_for_makes_no_room() -> None:
    """B10: otherwise two requests that do not fit would have their LoRAs loaded in turn forever."""
    engine = SimulatedEngine(**ONE, max_running_requests=1)
    engine.step(generate("first", prompt(20), 12))
    engine.step(with_lora("a", "x"), with_lora("b", "y"))
    for _ in range(8):
        engine.step(completions=1)
    assert [change.name for change in changes(engine)] == ["x"]
    engine.drain()
    assert [change.name for change in changes(engine)] == ["x", "y"]


@pytest.mark.parametrize("seat", ["waiting", "chunked", "dispatched", "running", "retracting", "releasing"])
def test_an_unload_sees_every_place(seat: str) -> None:
    """A05: in no queue, on its way back to it, or ended and not yet released."""
    engine = SimulatedEngine(**FLAGSHIP, **ONE)
    engine.drain(load("z", 3))
    engine.run(with_lora("warm", "x", prompt(4, 9)))
    if seat == "waiting":
        engine.step(PauseGeneration(call_id="p", mode=PauseMode.IN_PLACE))
    engine.step(with_lora("r", "x", prompt(125), 4))
    if seat == "dispatched":
        engine.step()
    if seat in ("running", "retracting", "releasing"):
        while not engine.scheduler.books.running:
            engine.step(completions=1)
        engine.step()
    if seat == "retracting":
        engine.step(PauseGeneration(call_id="p"))
    if seat == "releasing":
        engine.step(Abort(rid="r"))
    request = next(one for one in engine.scheduler.books.live() if one.rid == "r")
    assert request.place == seat
    engine.step(UnloadLora(call_id="u", name="x"))
    assert not engine.answers["u"].ok
    assert "is in use: " in engine.answers["u"].message
    if seat != "dispatched":
        word = "releasing" if seat == "retracting" else seat
        assert f"{word}=1" in engine.answers["u"].message
    engine.drain(ContinueGeneration(call_id="c"))
    engine.drain(UnloadLora(call_id="again", name="x"))
    assert engine.answers["again"].ok
    assert changes(engine)[-1] == LoraChange("x", drop=2)


def test_an_unload_that_waits_gives_up_at_its_deadline() -> None:
    """A08: and the LoRA takes requests again."""
    engine = SimulatedEngine(**ONE)
    engine.step(with_lora("r", "x", new=30))
    engine.step(UnloadLora(call_id="u", name="x", timeout_s=5.0))
    assert engine.last is not None
    assert engine.last.deadline == 5.0
    engine.step(UnloadLora(call_id="second", name="x", timeout_s=5.0), with_lora("late", "x"))
    assert "by another call" in engine.answers["second"].message
    assert engine.life("late").refusal is RefusalKind.NOT_FOUND
    engine.now = 5.0
    engine.step()
    assert "still in use after 5.0 s" in engine.answers["u"].message
    engine.drain(with_lora("again", "x"))
    assert engine.life("again").finish_reason is FinishReason.LENGTH


def test_one_unload_at_a_time_waits() -> None:
    engine = SimulatedEngine(max_loras=2, lora="x=embedded-lora:1,y=embedded-lora:2")
    engine.step(with_lora("r", "x"), with_lora("s", "y"))
    engine.step(*[UnloadLora(call_id=name, name=name, timeout_s=9.0) for name in "xy"])
    assert "another unload waits" in engine.answers["y"].message
    engine.drain()
    assert engine.answers["x"].ok
    assert list(engine.scheduler.features.loras.known) == ["y"]


def test_a_flush_and_an_unload_wait_side_by_side() -> None:
    engine = SimulatedEngine(**ONE)
    engine.step(with_lora("r", "x"))
    engine.step(FlushCache(call_id="f", timeout_s=7.0), UnloadLora(call_id="u", name="x", timeout_s=3.0))
    assert engine.last is not None
    assert engine.last.deadline == 3.0
    engine.drain()
    assert engine.answers["f"].ok
    assert engine.answers["u"].ok


def test_an_unload_of_what_is_being_loaded_follows_the_load() -> None:
    engine = SimulatedEngine(**FLAGSHIP, **ONE)
    engine.step(with_lora("r", "x"))
    engine.step(Abort(rid="r"), UnloadLora(call_id="u", name="x"))
    engine.drain()
    assert engine.answers["u"].ok
    assert changes(engine) == [LoraChange("x", 1, "embedded-lora:1"), LoraChange("x", drop=1)]
    assert engine.scheduler.stats().loras_resident == 0


def test_a_load_that_fails_for_requests_ends_them_and_nothing_else() -> None:
    engine = SimulatedEngine(max_loras=1, lora="x=embedded-lora:1,bad=/nowhere")
    engine.run(with_lora("r", "x"))
    engine.drain(with_lora("s", "bad"), with_lora("t", "bad"), with_lora("u", None))
    assert [engine.life(rid).finish_reason for rid in "stu"] == [*[FinishReason.UNAVAILABLE] * 2, FinishReason.LENGTH]
    assert "'/nowhere'" in (engine.life("s").error or "")
    engine.run(with_lora("v", "x"))
    assert engine.scheduler.stats().lora_loads == 1
    assert engine.scheduler.stats().cached_tokens == 48


def test_loras_stay_with_other_weights() -> None:
    engine = SimulatedEngine(**ONE)
    before = engine.run(with_lora("r", "x"))[0]
    engine.drain(UpdateWeights(call_id="w", model_path="embedded:7"))
    assert engine.scheduler.stats().loras_resident == 1
    after = engine.run(with_lora("r", "x"))[0]
    assert after not in (before, engine.run(with_lora("s", None))[0])
    assert len(changes(engine)) == 1


def test_an_update_waits_for_a_load_in_flight() -> None:
    engine = SimulatedEngine(**FLAGSHIP, max_loras=1)
    engine.step(load("x"))
    engine.step()
    engine.step(UpdateWeights(call_id="w", model_path="embedded:7"))
    assert "in_flight=1" in engine.answers["w"].message
    engine.drain()
    assert engine.answers["load-x-1"].ok


def test_an_update_does_not_wait_for_a_reading() -> None:
    engine = SimulatedEngine(**FLAGSHIP, **ONE)
    engine.pipeline.loras.hold()
    engine.step(with_lora("r", "x"))
    engine.step(UpdateWeights(call_id="w", model_path="embedded:7"))
    assert engine.microbatches[-1].mode is ForwardMode.UPDATE
    engine.pipeline.loras.release(None)
    engine.drain()
    assert engine.answers["w"].ok
    assert engine.life("r").finish_reason is FinishReason.LENGTH


def test_shares_of_a_lora_that_some_stage_cannot_read_are_dropped() -> None:
    engine = SimulatedEngine(max_loras=1, lora="bad=/nowhere")
    engine.step(with_lora("r", "bad"))
    assert engine.step().loras == (LoraOrder(1, "bad"),)
    assert engine.life("r").finish_reason is FinishReason.UNAVAILABLE
    assert changes(engine) == []


def test_a_reading_that_ends_after_a_death_changes_nothing() -> None:
    """A06"""
    engine = SimulatedEngine(**FLAGSHIP, **ONE)
    engine.step(load("z", 3))
    engine.apply(PipelineFailed(process="stage-1", cause="killed"))
    assert engine.apply(LoraRead(version=1)).microbatch is None
    assert engine.apply(LoraRead(version=1, error="no")).replies == ()
    assert changes(engine) == []


def test_a_pause_stops_loads_for_requests_and_no_calls() -> None:
    engine = SimulatedEngine(max_loras=2, lora="x=embedded-lora:1")
    engine.step(PauseGeneration(call_id="p"), with_lora("r", "x"), load("y", 2))
    engine.step()
    engine.step(completions=1)
    engine.step()
    assert [change.name for change in changes(engine)] == ["y"]
    engine.drain(ContinueGeneration(call_id="c"))
    assert engine.life("r").finish_reason is FinishReason.LENGTH


def test_a_death_answers_every_call() -> None:
    """A06: what is in flight, what is due and what waits."""
    engine = SimulatedEngine(**FLAGSHIP, **ONE)
    engine.step(with_lora("r", "x", new=30))
    engine.step(load("z", 3), load("v", 4))
    engine.step(UnloadLora(call_id="u", name="x", timeout_s=9.0))
    engine.step(PipelineFailed(process="stage-1", cause="killed"))
    for call in ("load-z-3", "load-v-4", "u"):
        assert "the stage-1 process died: killed" in engine.answers[call].message
    engine.step(load("late", 5))
    assert "the stage-1 process died" in engine.answers["load-late-5"].message


def test_a_request_that_waits_for_a_lora_costs_no_try() -> None:
    """B10: sixteen that do not fit end the search; those that lack their LoRA are passed without a try."""
    engine = SimulatedEngine(**ONE)
    engine.step(with_lora("r", "x", new=30))
    for _ in range(3):
        engine.step(completions=1)
    many = [with_lora(f"w{i}", "y", prompt(8, i), 1) for i in range(20)]
    engine.step(*many, generate("base", prompt(8, 50), 1), completions=1)
    assert "base" in engine.microbatches[-1].rids


def test_the_audit_sees_a_lora_that_was_dropped_under_a_request() -> None:
    engine = SimulatedEngine(**ONE)
    engine.step(with_lora("r", "x", new=30))
    for _ in range(3):
        engine.step(completions=1)
    engine.scheduler.features.loras.known["x"].version = 9
    with pytest.raises(IntegrityError, match="which the stages no longer hold"):
        audit(engine.scheduler)
    engine.scheduler.features.loras.known.pop("x").version = 1
    with pytest.raises(IntegrityError, match="which was unloaded"):
        audit(engine.scheduler)
