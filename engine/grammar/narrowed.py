"""Takes look-arounds of one character into the classes of the characters beside them, such as in names of hosts.

In a repetition with a bound every further character would be a state of the automaton that other look-arounds need.
"""

from __future__ import annotations

from engine.grammar.expressions import (
    ALL,
    Behind,
    Chars,
    Choice,
    Edge,
    Look,
    Node,
    Nodes,
    Ranges,
    Repeat,
    UnreadableError,
    class_text,
    complement,
    read,
)


def narrowed(pattern: str) -> str | None:
    """Return the same expression without look-arounds; None if one of them is beside no single character."""
    try:
        return _text_of(_narrowed(read(pattern, forbids=False)))
    except (UnreadableError, RecursionError):
        return None


def _narrowed(nodes: Nodes) -> Nodes:
    """Return a sequence without look-arounds. Raises UnreadableError."""
    found: list[Node] = []
    at = 0
    while at < len(nodes):
        first = last = ALL
        while at < len(nodes) and isinstance(look := nodes[at], Look):
            first = _both(first, _seen(look))
            at += 1
        if at == len(nodes):
            raise UnreadableError("a look-ahead at the end")
        node = nodes[at]
        at += 1
        while at < len(nodes) and isinstance(behind := nodes[at], Behind):
            last = _both(last, complement(behind.ranges) if behind.is_negative else behind.ranges)
            at += 1
        found.append(_between(first, node, last))
    return tuple(found)


def _seen(look: Look) -> Ranges:
    """Return the characters that a look-ahead allows."""
    if len(look.body) != 1 or not isinstance(look.body[0], Chars):
        raise UnreadableError("a look-ahead of several characters")
    return complement(look.body[0].ranges) if look.is_negative else look.body[0].ranges


def _between(first: Ranges, node: Node, last: Ranges) -> Node:
    """Return a node whose text begins with one character of a class, and ends with one of another."""
    if isinstance(node, Chars):
        return Chars(_both(_both(node.ranges, first), last))
    is_free = first == last == ALL
    if isinstance(node, Repeat):
        body = node.body
        if is_free:
            return Repeat(_narrowed(body), node.low, node.high)
        if len(body) == 1 and isinstance(body[0], Chars) and node.low:
            return _repeated(first, body[0].ranges, last, node.low, node.high)
    if isinstance(node, Choice) and is_free:
        return Choice(tuple(_narrowed(option) for option in node.options))
    if not isinstance(node, Edge) or not is_free or node.kind not in "^$":
        raise UnreadableError("a look-around beside no character")
    return node


def _repeated(first: Ranges, chars: Ranges, last: Ranges, low: int, high: int | None) -> Node:
    first, last = _both(chars, first), _both(chars, last)
    options: list[Nodes] = [(Chars(_both(first, last)),)] if low == 1 else []
    if high is None or high > 1:
        inner = Repeat((Chars(chars),), max(low - 2, 0), None if high is None else high - 2)
        options.append((Chars(first), inner, Chars(last)))
    return Choice(tuple(options))


def _both(one: Ranges, other: Ranges) -> Ranges:
    return complement((*complement(one), *complement(other)))


def _text_of(nodes: Nodes) -> str:
    return "".join(map(_text_of_node, nodes))


def _text_of_node(node: Node) -> str:
    if isinstance(node, Chars) and node.ranges:
        return class_text(node.ranges)
    if isinstance(node, Choice):
        return f"(?:{'|'.join(map(_text_of, node.options))})"
    if isinstance(node, Repeat):
        return f"(?:{_text_of(node.body)}){{{node.low},{'' if node.high is None else node.high}}}"
    if isinstance(node, Edge):
        return node.kind
    raise UnreadableError("no character is left")
