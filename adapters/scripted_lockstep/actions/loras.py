"""Actions on LoRA adapters, which operators load and unload beside running requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Final

from engine.core.config import EMBEDDED_LORA, embedded_lora_seed
from engine.core.messages import LoadLora, UnloadLora
from scripted.core.action import Action, RunLike, SearchBase, verb
from scripted.core.errors import BadCall
from scripted.core.phrases import printable
from scripted.core.verb import Verb
from scripted.script.clients import Call
from scripted_lockstep.actions.action import EngineAction, EngineCall, EventReader
from scripted_lockstep.actions.calls import DEFERRED_S, check_timeout

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

# Larger than the seeds of workloads, so that a LoRA that a search loads under one of their names has other weights.
_OTHER_SEED: Final = 9


def _names_in(base: SearchBase) -> Iterable[str]:
    """Return the LoRAs that requests of a workload name."""
    return dict.fromkeys(name for start in base.starts if (name := getattr(start, "lora", None)) is not None)


class LoraLoad(EngineCall, frozen=True, kw_only=True, omit_defaults=True, tag="load-lora"):
    """Loads the embedded model's LoRA of ``seed``, or the one in ``path_of_lora``, as ``name``."""

    name: str
    seed: int = 1
    path_of_lora: str | None = None

    examples: ClassVar = ("load-lora name=y", "load-lora name=y seed=3")
    event: ClassVar = LoadLora
    route: ClassVar = "/v1/load_lora_adapter"

    @staticmethod
    @verb
    def load_lora(t: BaseContext, name: str, path: str) -> Call:
        """POST ``/v1/load_lora_adapter``: 'embedded-lora:SEED', or in the server tier any folder of peft's.

        Every LoRA that a script loads is unloaded before the next script.
        """
        if not isinstance(path, str):
            raise BadCall(f"load_lora() takes path as a text, such as 'embedded-lora:1', got {path!r}")
        return LoraLoad(name=name, path_of_lora=path).post(t)

    @property
    def path_given(self) -> str:
        """Return the LoRA's path for the route."""
        return f"{EMBEDDED_LORA}:{self.seed}" if self.path_of_lora is None else self.path_of_lora

    @property
    def body(self) -> Mapping[str, object]:
        return {"lora_name": self.name, "lora_path": self.path_given}

    def message(self, call_id: str) -> LoadLora:
        return LoadLora(call_id=call_id, name=self.name, path=self.path_given)

    def reaches(self, run: RunLike) -> bool:
        return bool(run.machine.limits.max_loras) and super().reaches(run)

    def verbs(self) -> tuple[Verb, ...]:
        return (Verb("load_lora", self.name, self.path_given),)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Return loads of other weights under each name of the workload, refused while that name is loaded, and of a
        new name.
        """
        if not base.limits.max_loras:
            return ()
        return [cls(name=name, seed=_OTHER_SEED) for name in (*_names_in(base), "extra")]

    @classmethod
    def read_back(cls, event: LoadLora, reader: EventReader) -> LoraLoad:
        """Return the action with a LoRA of the embedded model instead of any other."""
        seed = embedded_lora_seed(event.path)
        return cls(name=event.name) if seed is None else cls(name=event.name, seed=seed)

    @classmethod
    def words(cls, event: LoadLora) -> str:
        return f"load LoRA {printable(event.name)} from {printable(event.path)}"


class LoraUnload(EngineCall, frozen=True, kw_only=True, omit_defaults=True, tag="unload-lora"):
    """Unloads a LoRA by its name; with ``timeout_s`` the call waits for the requests that use it."""

    name: str
    timeout_s: float | None = None

    examples: ClassVar = ("unload-lora name=x", "unload-lora name=x timeout_s=2.5")
    event: ClassVar = UnloadLora
    route: ClassVar = "/v1/unload_lora_adapter"

    @staticmethod
    @verb
    def unload_lora(t: BaseContext, name: str, timeout_s: float | None = None) -> Call:
        """POST ``/v1/unload_lora_adapter``; ``timeout_s``, in virtual seconds, is how long it may wait."""
        check_timeout("unload_lora()", timeout_s)
        return LoraUnload(name=name, timeout_s=timeout_s).post(t)

    @property
    def kind(self) -> str:
        return "unload-lora" if self.timeout_s is None else "unload-lora-later"

    @property
    def body(self) -> Mapping[str, object]:
        return {"lora_name": self.name} | ({} if self.timeout_s is None else {"timeout": self.timeout_s})

    def reaches(self, run: RunLike) -> bool:
        return self.name in run.machine.scheduler.features.loras.known and super().reaches(run)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return [cls(name=name, timeout_s=timeout_s) for name in _names_in(base) for timeout_s in (None, DEFERRED_S)]

    @classmethod
    def words(cls, event: UnloadLora) -> str:
        wait = "" if event.timeout_s is None else f", waits up to {event.timeout_s:g} s"
        return f"unload LoRA {printable(event.name)}{wait}"


class HoldLoras(EngineAction, frozen=True, kw_only=True, omit_defaults=True, tag="hold-loras"):
    """Holds the reading of LoRAs: no read completes from this step on."""

    examples: ClassVar = ("hold-loras",)
    needs_open: ClassVar[bool] = True
    is_control: ClassVar[bool] = True

    @staticmethod
    @verb
    def hold_loras(t: BaseContext) -> None:
        """From the next step on, the stages complete no read of a LoRA until it is released."""
        t.run.act(HoldLoras())

    def apply(self, run: RunLike) -> None:
        run.device.loras.hold()

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return (cls(),) if base.limits.max_loras else ()


class ReleaseLoras(EngineAction, frozen=True, kw_only=True, omit_defaults=True, tag="release-loras"):
    """Releases ``count`` held LoRAs, in the order in which they were ordered; by default all of them."""

    count: int | None = None

    examples: ClassVar = ("release-loras", "release-loras count=1")
    is_control: ClassVar[bool] = True

    @staticmethod
    @verb
    def release_loras(t: BaseContext, n: int | None = None) -> None:
        """Let the reads of the oldest ``n`` LoRAs complete, or all of them and stop holding."""
        t.check_released("release_loras()", n)
        t.run.act(ReleaseLoras(count=n))

    def apply(self, run: RunLike) -> None:
        run.device.loras.release(self.count)

    def reaches(self, run: RunLike) -> bool:
        return bool(run.device.loras.is_holding)
