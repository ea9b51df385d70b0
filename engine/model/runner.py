"""The runner of one stage: takes a microbatch and hidden states, returns hidden states or, on the last stage, tokens.

Owns the stage's model, KV pool, sampler and counters; never talks to another process. A failed forward pass fails only
its own microbatch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from engine.core.config import EngineConfig
from engine.core.errors import DeviceLostError, EngineError, IntegrityError, StepFailedError
from engine.core.limits import Limits
from engine.core.messages import Completion
from engine.core.plan import (
    Control,
    LoraChange,
    LoraOrder,
    LoraUpdate,
    Microbatch,
    ProfileSwitch,
    SleepSwitch,
    WeightUpdate,
)
from engine.grammar.compiled import CompiledGrammars
from engine.model.backend import ComputingStage, make_stage
from engine.model.batch import Batch, DecodeBatch, ForwardBatch, emitters_of
from engine.model.checkpoint import (
    local_folder,
    read_kv_origin,
    read_model_config,
    read_never_sampled_ids,
    require_same_model,
    resolve_folder,
    tokenizer_reader,
)
from engine.model.drafting import DraftModel
from engine.model.host_pool import HostPool
from engine.model.lora import LoadedLora, ReadLoras, StageLoras
from engine.model.newest_tokens import DeviceTokens, NewestTokens
from engine.model.page_image import PageImages
from engine.model.page_layout import KVOrigin
from engine.model.profiling import StageProfile
from engine.model.prompt_logprobs import PromptScores, ScoreTaker
from engine.model.prompt_vectors import PromptVectors
from engine.model.sampler_output import LaunchedStep
from engine.model.sampling import Sampler
from engine.model.sleeping_stage import AsleepStage, FileStates, give_back, require_as_read, states_of
from engine.model.slot_record import SlotRecord
from engine.model.stage_slice import PROBED_TOKENS, OnLoad
from engine.model.threads import TORCH_THREADS, stage_threads
from engine.model.verification import verify

_log = logging.getLogger(__name__)

_NO_MICROBATCH = -1

_Output = TypeVar("_Output")
# The commit of a control, which cannot fail.
Rest = Callable[[], None]


class RunnerCounters(msgspec.Struct, kw_only=True):
    """A stage's counts since its start or the last ``forget``; the id is -1 before the first microbatch."""

    last_microbatch_id: int = _NO_MICROBATCH
    microbatches: int = 0
    failed: int = 0
    tokens: int = 0


class StageRunner:
    """Stage ``stage`` of ``limits.pp_size``; with one stage it is both the first and the last.

    Sets the number of torch's threads in its process, see ``stage_threads``. ``lean=False`` computes with transformers'
    own forward pass even if a faster one is equivalent; ``on_load`` is called for each loaded weight. With ``early``,
    the default on GPUs, async scheduling may launch a microbatch before the host knows the tokens of the previous one.
    ``grammars`` are the compiled ones. Raises CheckpointError if the model does not load.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        stage: int,
        *,
        lean: bool = True,
        on_load: OnLoad | None = None,
        early: bool | None = None,
    ) -> None:
        torch.set_num_threads(stage_threads(config, limits, TORCH_THREADS))
        self.stage = stage
        self.counters = RunnerCounters()
        self._config = config
        self._limits = limits
        self._lean = lean
        self.model = make_stage(config, limits, stage, lean=lean, on_load=on_load)
        self.facts = self.model.facts
        # The folder of the weights, None for the configured model, and the state of its files when it was read.
        self._source: str | None = None
        self._files = states_of(self.facts.folder)
        self._origin = self._origin_of(self.facts.folder)
        # The commit of each prepared control, by its number.
        self._prepared: dict[int, Rest] = {}
        self.read_loras = ReadLoras()
        self._profile: StageProfile | None = None
        self._host = HostPool(self.model.pool, limits) if limits.host_pages else None
        self._record = SlotRecord(self.model.pool, sanitize=config.kv_sanitizer, host_pages=limits.host_pages)
        self._never = never = read_never_sampled_ids(self.facts.folder)
        self.grammars = CompiledGrammars(
            tokenizer_reader(self.facts.folder, trust_remote_code=config.trust_remote_code, now=self.facts.is_last),
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
        )
        self._sampler = Sampler(
            never=never, vocab_size=limits.vocab_size, device=self.model.device, grammars=self.grammars
        )
        pooling = self.facts.pooling
        self._vectors = PromptVectors(pooling) if pooling is not None and self.facts.is_last else None
        self._draft_model = self._new_draft_model()
        self._fail_next = False
        self._on_device = self._new_device_tokens(early)
        self._newest = NewestTokens(self._on_device) if limits.async_scheduling else None

    def _new_device_tokens(self, early: bool | None) -> DeviceTokens | None:
        """Return the store of tokens on the device, if microbatches are launched before the host knows them."""
        is_early = self.model.device.type == "cuda" if early is None else early
        if not self._limits.async_scheduling or self.model.backend != "torch" or not is_early:
            return None
        return DeviceTokens(self._limits.rows, self.model.device)

    @property
    def slots_written(self) -> int:
        return self._record.slots_written

    def slots_digest(self) -> str:
        """Return a digest of the token and the position in each KV slot."""
        return self._record.digest()

    def page_images(self) -> PageImages:
        """Return the current pages; a stage that has slept has new ones."""
        return PageImages(
            self.model.pool, self._record, stage=self.stage, stages=self._limits.pp_size, origin=self._origin
        )

    def _origin_of(self, folder: Path) -> KVOrigin | None:
        """Read the origin of KV, if this engine exchanges KV with others."""
        return None if self._config.role == "both" else read_kv_origin(folder, self._config)

    def fail_next(self, *, on: bool = True) -> None:
        """Make the next forward pass raise, like a broken kernel, or cancel that; for fault injection."""
        self._fail_next = on

    def forget(self) -> None:
        """Reset counters, slot records, sampling specs, grammars and a planned failure, for the next script.

        Call it only after a flush: the records of prefixes that are still cached would be lost.
        """
        self.counters = RunnerCounters()
        self._record.forget()
        self._sampler.forget()
        if self._draft_model is not None:
            self._draft_model.forget()
        if self._newest is not None:
            self._newest.forget()
        self.grammars.clear()
        self.read_loras.clear()
        self._fail_next = False

    def forward(self, microbatch: Microbatch, hidden: torch.Tensor | None = None) -> torch.Tensor | Completion:
        """Compute one microbatch.

        ``hidden`` [tokens, hidden size] comes from the previous stage, None on the first. Returns hidden states for the
        next stage, or a Completion: the sampled tokens on the last stage, an error on any stage whose forward pass
        failed. Raises IntegrityError, because continuing would serve wrong tokens, and DeviceLostError if the device is
        unusable, such as after an illegal memory access of a kernel.
        """
        if self._newest is not None:
            microbatch = msgspec.structs.replace(microbatch, segments=self._newest.resolve(microbatch.segments))
        output = self._guarded(microbatch, partial(self._compute, microbatch, hidden))
        if self._newest is not None and isinstance(output, Completion):
            self._newest.note(microbatch.segments, output, on_device=False)
        return output

    def _guarded(self, microbatch: Microbatch, compute: Callable[[], _Output]) -> _Output | Completion:
        """Run a computation. An exception fails only this microbatch."""
        try:
            output: _Output | Completion = compute()
        except IntegrityError:
            raise
        except Exception as exc:  # noqa: BLE001 - any exception of a kernel fails only this microbatch
            _log.warning("stage %d failed in microbatch %d", self.stage, microbatch.id, exc_info=exc)
            self._require_device(exc)
            self.counters.failed += 1
            self._record.abandon(microbatch.segments)
            output = Completion(
                microbatch_id=microbatch.id,
                error=f"stage {self.stage} failed in microbatch {microbatch.id}: {type(exc).__name__}: {exc}",
            )
        self._count(microbatch)
        if self._profile is not None:
            self._profile.note_step()
        return output

    def skip(self, microbatch: Microbatch) -> None:
        """Adopt a microbatch's pages and sampling specs without computing it, after an earlier stage has failed it."""
        try:
            self._adopt(microbatch)
        except StepFailedError as exc:
            # The microbatch of an invalid plan has failed already; it must not end this stage too.
            _log.warning("stage %d cannot take over microbatch %d: %s", self.stage, microbatch.id, exc)
        self._record.abandon(microbatch.segments)
        self._count(microbatch)
        self.counters.failed += 1

    # -- without waiting for the device --

    def can_be_followed(self, microbatch: Microbatch) -> bool:
        """Return whether the next microbatch may be launched before this one's result is known, with async scheduling.

        Not after controls, which the host carries out, after prompt logprobs, which it reads part by part, or after
        segments whose next token depends on earlier ones, which it must know. Async scheduling excludes drafts.
        """
        return (
            self._newest is not None
            and not microbatch.is_control
            and not any(
                segment.logprobs_from >= 0 or (segment.emits and self._sampler.reads_history(segment))
                for segment in microbatch.segments
            )
        )

    def can_launch(self, microbatch: Microbatch) -> bool:
        return self._on_device is not None and self.can_be_followed(microbatch)

    def launch(self, microbatch: Microbatch) -> LaunchedStep:
        """Launch one microbatch on the device, behind the earlier ones. Neither blocks nor raises.

        A segment that is planned ahead continues from the token that the device chose for its row.
        """
        launched = LaunchedStep(microbatch)
        try:
            self._enqueue(launched)
        except Exception as exc:  # noqa: BLE001 - ``finish`` reports it in its turn
            launched.failure = exc
            assert self._on_device is not None, "a runner launches early only with tokens on the device"
            self._on_device.drop(microbatch.segments)
        return launched

    def finish(self, launched: LaunchedStep) -> Completion:
        """Wait for the oldest launched microbatch and return its result; see ``forward``."""
        segments = launched.microbatch.segments
        completion = self._guarded(launched.microbatch, partial(self._result_of, launched))
        assert self._newest is not None, "only async scheduling launches early"
        self._newest.note(segments, completion, on_device=True)
        return completion

    @torch.inference_mode()
    def _enqueue(self, launched: LaunchedStep) -> None:
        microbatch, on_device = launched.microbatch, self._on_device
        assert on_device is not None, "a runner launches early only with tokens on the device"
        segments, ahead = on_device.place(microbatch.segments)
        self._adopt(microbatch)
        self._fail_if_asked()
        if microbatch.copies is not None and self._host is not None:
            self._host.carry_out(microbatch.copies, self.model.pool)
        batch = self.model.batch(segments)
        assert isinstance(batch, ForwardBatch | DecodeBatch), "only torch launches early"
        if ahead is not None:
            batch.take_ahead(ahead)
        emitters = emitters_of(segments)
        choice = self._sampler.choose(self._forward(batch, None), emitters, self._record.history)
        on_device.keep(emitters, choice.ids)
        launched.note(batch, choice, self.model.device)

    @torch.inference_mode()
    def _result_of(self, launched: LaunchedStep) -> Completion:
        """Do the host's part: first the slot record, while the device computes, then the result."""
        if launched.failure is not None:
            raise launched.failure
        microbatch = launched.microbatch
        assert self._newest is not None, "only async scheduling launches early"
        segments = self._newest.resolve(microbatch.segments)
        if microbatch.copies is not None:
            self._record.carry_out(microbatch.copies)
        self._record.write(launched.learn(segments))
        token_ids, logprobs = launched.sampled()
        return Completion(microbatch_id=microbatch.id, token_ids=token_ids, logprobs=logprobs)

    # -- controls, in two steps, so that all stages commit one or none does --

    def prepare(self, control: Control) -> str | None:
        """Do the part of a control that can fail. Returns the reason of a failure, None on success.

        Holds new weights beside the current ones until ``settle``, which also takes a LoRA that was read, and frees the
        memory of a stage that goes to sleep.
        """
        error: str | None = None
        rest: Rest | None = None
        try:
            match control:
                case WeightUpdate():
                    rest = self._load_beside(control.path)
                case LoraUpdate():
                    rest = self._prepare_lora(control.change)
                case SleepSwitch(level=0):
                    rest = self._wake()
                case SleepSwitch():
                    rest = self._prepare_sleep()
                case ProfileSwitch():
                    self._switch_profile(control.folder)
        except Exception as exc:  # noqa: BLE001 - a failed control must not end an engine that serves
            error = self._why_not(control, exc)
        if error is not None:
            give_back(self.model.device)
        if rest is not None:
            self._prepared[control.id] = rest
        self._count(control)
        self.counters.failed += error is not None
        return error

    def settle(self, number: int, *, commit: bool) -> None:
        """Commit or discard the change that a control has prepared."""
        rest = self._prepared.pop(number, None)
        if rest is not None and commit:
            rest()
        elif rest is not None:
            del rest
            give_back(self.model.device)

    def _why_not(self, control: Control, exc: Exception) -> str:
        """Describe a control's failure for callers. Only the log gets tracebacks."""
        match control:
            case LoraUpdate():
                return self._why_no_lora(control.change, exc)
            case WeightUpdate():
                doing = f"load {control.path or 'its weights'}"
            case SleepSwitch():
                doing = "sleep" if control.level else "wake"
            case ProfileSwitch():
                doing = "profile"
        return f"stage {self.stage}: {exc}" if isinstance(exc, EngineError) else self._logged(doing, exc)

    def _why_no_lora(self, lora: LoraOrder | LoraChange, exc: Exception) -> str:
        """Describe the failure of a LoRA, for callers and for requests that wait for it.

        Clients whose requests wait must not learn its path; operators may learn everything.
        """
        return self._logged(f"load the LoRA {lora.name!r} from {lora.path}", exc)

    def _logged(self, doing: str, exc: Exception) -> str:
        is_expected = isinstance(exc, EngineError)
        why = str(exc) if is_expected else f"{type(exc).__name__}: {exc}"
        _log.warning("stage %d could not %s: %s", self.stage, doing, why, exc_info=None if is_expected else exc)
        return f"stage {self.stage} could not {doing}: {why}"

    def _load_beside(self, source: str | None) -> Rest:
        """Load weights beside the current ones, which doubles their memory. A sleeping stage only checks them: waking
        loads them again.
        """
        self._fail_if_asked()
        config, folder = self._place_of(source)
        other = read_model_config(folder, trust_remote_code=config.trust_remote_code)
        require_same_model(self.facts.description, other.to_dict(), folder)
        # The probe of the new weights must not write into a page that is in use.
        pages = self._limits.pages_for(PROBED_TOKENS)
        window_pages = pages if self._limits.window_tokens else 0
        limits = msgspec.structs.replace(self._limits, total_pages=pages, window_pages=window_pages, rows=1)
        made = self._make_alike(config, limits)
        note = partial(self._note_weights, source, states_of(folder), self._origin_of(folder))
        if not isinstance(self.model, AsleepStage):
            return partial(self._take_weights, made, note)
        del made
        give_back(self.model.device)
        return note

    def _take_weights(self, made: ComputingStage, note: Rest) -> None:
        made.take_pool(self.model.pool)
        self._become(made)
        self._record.change_weights()
        note()

    def _become(self, made: ComputingStage) -> None:
        """Replace the computing stage, keeping the loaded LoRAs."""
        if made.lora is not None and self.model.lora is not None:
            made.lora.become(self.model.lora)
        self.model, self.facts = made, made.facts

    def _note_weights(self, source: str | None, files: FileStates, origin: KVOrigin | None) -> None:
        self._source, self._files, self._origin = source, files, origin

    def _prepare_sleep(self) -> Rest:
        """Build the sleeping stage. Memory is freed only at the commit, by all stages or by none."""
        self._fail_if_asked()
        one_page = msgspec.structs.replace(self._limits, total_pages=1, window_pages=0, window_tokens=0)
        return partial(self._fall_asleep, AsleepStage(self.model, one_page))

    def _fall_asleep(self, asleep: AsleepStage) -> None:
        """Free weights, KV, host pages and the draft model. LoRAs stay in memory."""
        self.model = asleep
        self._host = self._draft_model = None
        self._record.move_to(self.model.pool)
        self._record.change_weights()
        give_back(self.model.device)

    def _wake(self) -> Rest | None:
        if not isinstance(self.model, AsleepStage):
            return None
        self._fail_if_asked()
        config, folder = self._place_of(self._source)
        require_as_read(folder, self._files)
        made = self._make_alike(config, self._limits)
        host = HostPool(made.pool, self._limits) if self._limits.host_pages else None
        return partial(self._go_on, made, host, self._new_draft_model())

    def _go_on(self, made: ComputingStage, host: HostPool | None, draft_model: DraftModel | None) -> None:
        self._become(made)
        self._host, self._draft_model = host, draft_model
        self._record.move_to(made.pool)
        give_back(made.device)

    def _new_draft_model(self) -> DraftModel | None:
        if not (self._limits.has_draft_model and self.facts.is_last):
            return None
        return DraftModel(self._config, self._limits, never=self._never, device=self.model.device)

    def begin_lora(self, order: LoraOrder) -> Callable[[], str | None]:
        """Return the reading of this stage's share of a LoRA, for another thread; it returns the reason of a failure.

        It reads for the current model, which a weight update may replace meanwhile.
        """
        self.read_loras.want(order.version)
        return partial(self._read_lora, order, self.model.lora)

    def _read_lora(self, order: LoraOrder, loras: StageLoras | None) -> str | None:
        assert order.path is not None, f"{order} has no path to read"
        try:
            self.read_loras.read(order.version, order.path, _there(loras))
        except Exception as exc:  # noqa: BLE001 - a LoRA that cannot be read must not end an engine that serves
            self.read_loras.forget(order.version)
            return self._why_no_lora(order, exc)
        return None

    def _prepare_lora(self, change: LoraChange) -> Rest:
        """Move the share that was read to the device. It is dropped if another stage fails."""
        loras = _there(self.model.lora)
        if change.path is None:
            self._fail_if_asked()
            return partial(self._take_lora, change, None)
        read = self.read_loras.take(change.version, loras)
        self._fail_if_asked()
        return partial(self._take_lora, change, loras.on_device(read))

    def _take_lora(self, change: LoraChange, loaded: LoadedLora | None) -> None:
        """Take a loaded LoRA, and drop the one that makes room for it."""
        held = _there(self.model.lora).held
        if loaded is not None:
            held[change.version] = loaded
        if change.drop:
            del held[change.drop]

    def _switch_profile(self, folder: str | None) -> None:
        # A profile may still run if another stage failed to start its own.
        former, self._profile = self._profile, None
        try:
            if former is not None:
                former.stop()
            self._fail_if_asked()
            self._profile = None if folder is None else StageProfile(folder, self.stage)
        except OSError as exc:
            if exc.strerror is None or folder is None:
                raise
            raise StepFailedError(
                f"a trace must be written into {folder}, but: {exc.strerror} ({exc.filename}); make the folder "
                "writable for the server, or start it with another profile_dir"
            ) from exc

    def _place_of(self, source: str | None) -> tuple[EngineConfig, Path]:
        """Return the configuration for weights from ``source``, and their folder.

        Keeps the backend, and the types of the KV cache and of hidden states, for files of any type.
        """
        values = {
            "backend": self.model.backend,
            "dtype": str(self.facts.dtype).removeprefix("torch."),
            "model": source or self._config.model,
        }
        config = self._config.model_copy(update=values)
        return config, local_folder(config) if source else resolve_folder(config)

    def _make_alike(self, config: EngineConfig, limits: Limits) -> ComputingStage:
        """Build a stage with new weights, which must be able to compute with the loaded LoRAs."""
        made, loras = make_stage(config, limits, self.stage, lean=self._lean), self.model.lora
        if loras is not None and loras.held and not (made.lora is not None and made.lora.has_the_products_of(loras)):
            raise StepFailedError(
                "while LoRAs are loaded, new weights must be computed like the current ones, but are not; unload "
                "the LoRAs first"
            )
        return made

    def _require_device(self, failure: Exception) -> None:
        """Raise DeviceLostError if the GPU's context is broken: every call on it fails then, ``failure`` being the
        first.
        """
        if self.model.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.model.device)
        except RuntimeError as exc:
            raise DeviceLostError(f"stage {self.stage} has lost {self.model.device}: {failure}") from exc

    def _fail_if_asked(self) -> None:
        if self._fail_next:
            self._fail_next = False
            raise StepFailedError("a failure was injected into this forward pass")

    @torch.inference_mode()
    def logits(self, microbatch: Microbatch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the logits [emitting segments, vocabulary] of a microbatch on the last stage, without sampling.

        For comparisons with other implementations; unlike ``forward`` it counts nothing and propagates exceptions.
        """
        assert self.facts.is_last, f"stage {self.stage} has no head; call the last stage"
        self._adopt(microbatch)
        return self.model.forward(self._batch(microbatch), hidden).clone()

    def _adopt(self, microbatch: Microbatch) -> None:
        if isinstance(self.model, AsleepStage):
            raise IntegrityError(f"a sleeping stage must not compute, got {list(microbatch.rids)}")
        for segment in microbatch.segments:
            self.model.pool.adopt(segment)
            self._sampler.adopt(segment)
        if self._draft_model is not None:
            self._draft_model.adopt(microbatch)

    def _batch(self, microbatch: Microbatch) -> Batch:
        batch = self.model.batch(microbatch.segments)
        self._record.write(batch)
        return batch

    @torch.inference_mode()
    def _compute(self, microbatch: Microbatch, hidden: torch.Tensor | None) -> torch.Tensor | Completion:
        self._adopt(microbatch)
        self._fail_if_asked()
        if microbatch.copies is not None and self._host is not None:
            self._host.carry_out(microbatch.copies, self.model.pool)
            self._record.carry_out(microbatch.copies)
        batch = self._batch(microbatch)
        scores = None
        if self.facts.is_last and any(segment.logprobs_from >= 0 for segment in microbatch.segments):
            scores = PromptScores(microbatch.segments, self._sampler.spec_of)
        take_scored = None if scores is None else scores.take
        output = self._forward(batch, hidden, take_scored)
        if not self.facts.is_last:
            return output
        if self._vectors is not None:
            return verify(microbatch, *self._vectors.take(output, microbatch.segments))
        token_ids, logprobs = self._sampler.sample(output, emitters_of(batch.segments), self._record.history)
        result = verify(microbatch, token_ids, logprobs, self._sampler.dead_ends)
        if self._draft_model is not None:
            result = msgspec.structs.replace(result, guesses=self._draft_model.guess(microbatch, result))
        if self._sampler.errors:
            result = msgspec.structs.replace(result, errors=self._sampler.errors)
        return result if scores is None else msgspec.structs.replace(result, prompt_logprobs=scores.parts())

    def _forward(
        self, batch: Batch, hidden: torch.Tensor | None, take_scored: ScoreTaker | None = None
    ) -> torch.Tensor:
        if self._profile is None:
            return self.model.forward(batch, hidden, take_scored)
        with torch.profiler.record_function(f"stage on {self.model.backend}"):
            return self.model.forward(batch, hidden, take_scored)

    def _count(self, microbatch: Microbatch) -> None:
        self.counters.last_microbatch_id = microbatch.id
        self.counters.microbatches += 1
        self.counters.tokens += microbatch.tokens


def _there(loras: StageLoras | None) -> StageLoras:
    if loras is None:
        raise StepFailedError("this stage holds no LoRAs; start the server with --max-loras N")
    return loras
