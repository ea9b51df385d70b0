"""What all engines of this folder have: requests, and a pool of blocks in which each has room for all of its tokens."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """``computed`` of its tokens are in its blocks."""

    id: str
    tokens: list[int]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    prompt_tokens: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    ended: str = ""

    def __post_init__(self):
        self.prompt_tokens = len(self.tokens)

    @property
    def most_tokens(self) -> int:
        return self.prompt_tokens + self.max_new_tokens

    def say(self, token: int) -> str:
        """Take a sampled token; return why the request ends with it, or nothing."""
        self.tokens.append(token)
        if token in self.stop_token_ids:
            self.ended = "stop"
        elif len(self.tokens) == self.most_tokens:
            self.ended = "length"
        return self.ended


@dataclass
class Work:
    """The positions ``start`` to ``start + count - 1`` of a request, in these blocks."""

    request: Request
    start: int
    count: int
    blocks: tuple[int, ...]


class Pool:
    """Blocks of KV."""

    def __init__(self, blocks: int, block_size: int):
        self.block_size = block_size
        self.blocks = blocks
        self.free = list(range(blocks))

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self, request: Request) -> bool:
        """Give a request room for all of its tokens, if there is room."""
        count = self.blocks_of(request.most_tokens)
        if count > len(self.free):
            return False
        request.blocks = [self.free.pop(0) for _ in range(count)]
        return True

    def give_back(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = []


def work_of(request: Request, budget: int) -> Work:
    """The next tokens of a request, at most so many: a part of its prompt, or the token that it said last."""
    count = min(len(request.tokens) - request.computed, budget)
    return Work(request, request.computed, count, tuple(request.blocks))
