"""Leases that come, grow, publish and go in any order: what the plain memory and that with windows must survive."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from engine.core.memory import KVMemory, Lease
from engine.core.memory.integrity import check_memory


class LeaseMachine(RuleBasedStateMachine):
    """The audit finds nothing after any rule. A subclass names a memory of few pages."""

    leases = Bundle("leases")

    def __init__(self, memory: KVMemory) -> None:
        super().__init__()
        self.memory = memory
        self.live: list[Lease] = []
        self.ids: dict[str, list[int]] = {}

    @rule(target=leases, ids=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def admit(self, ids: list[int]) -> Lease | None:
        lease = self.memory.admit(f"r{len(self.ids)}", ids, spare_pages=0)
        if lease is not None:
            self.live.append(lease)
            self.ids[lease.rid] = ids
        return lease

    @rule(lease=leases, share=st.floats(0.1, 1))
    def extend(self, lease: Lease | None, share: float) -> None:
        if lease is not None and not lease.released:
            before = len(lease.pages)
            if not self.memory.extend(lease, int(len(self.ids[lease.rid]) * share)):
                assert len(lease.pages) == before

    @rule(lease=leases)
    def publish(self, lease: Lease | None) -> None:
        if lease is not None and not lease.released:
            confirmed = min(len(self.ids[lease.rid]), len(lease.pages) * self.memory.pages.page_size)
            self.memory.publish(lease, self.ids[lease.rid][:confirmed], counts=True)

    @rule(lease=consumes(leases))
    def release(self, lease: Lease | None) -> None:
        if lease is not None:
            self.memory.release(lease)
            self.live.remove(lease)

    @invariant()
    def books_balance(self) -> None:
        check_memory(self.memory, self.live)
