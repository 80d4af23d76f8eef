"""Finding blocks that already hold the keys and values of a request's first tokens.

Each full block of computed tokens has a key: blake2b over the key of the block before it and its own token
ids. The first block's parent is a root over the model's identity and the request's salt, so equal tokens
under another model, precision or salt never meet, and keys are the same in every process. A key is only
the way to a candidate: before a block is shared its parent key and its tokens are compared one by one.
A block has at most one live key, a key leads to at most one block, and partly filled blocks have none.
What the pool evicts may still lie in host memory (`engine.host_cache`) and is then found there.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from engine.block_pool import BlockPool, LedgerError
from engine.host_cache import Entry, HostCache
from engine.plan import Arena
from engine.request import NO_BLOCK

KEY_BYTES = 16
MAX_GHOSTS = 1 << 16  # evicted keys remembered, to tell "evicted" from "no match"

MISS_OFF = "switched off"
MISS_SHORT = "shorter than a block"
MISS_NO_MATCH = "no match"
MISS_EVICTED = "evicted"
MISS_SALT = "other salt"
MISS_NO_RUN = "no contiguous run"  # the hit was given up so that the request could start

HashFunction = Callable[[bytes], bytes]
V = TypeVar("V")


def _blake2b(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Match:
    """What holds a request's first ``num_tokens`` tokens, and why not more ("" if more could not be).

    ``blocks`` are pool blocks in token order, `NO_BLOCK` where only host memory has the content; ``host``
    lists (index, block of host memory in ``arena``) for those.
    """

    blocks: list[int]
    host: list[tuple[int, int]]
    num_tokens: int
    miss_reason: str
    arena: Arena = "prefix"


class PrefixCache:
    """Keys of the full blocks of one pool. Not thread-safe: the step thread owns it.

    ``identity`` names all that decides what a token's keys and values are: model, weights, precision.
    ``host`` is the tier behind the pool. ``hash_key`` maps bytes to a key; tests pass a weak one to provoke
    collisions.
    """

    def __init__(
        self,
        identity: str,
        block_size: int,
        hash_key: HashFunction = _blake2b,
        *,
        host: HostCache | None = None,
    ) -> None:
        self.block_size = block_size
        self._host = host
        self._identity = identity.encode()
        self._hash = hash_key
        self._block_of: dict[bytes, int] = {}
        self._entries: dict[int, Entry] = {}
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._first_salt: OrderedDict[bytes, str] = (
            OrderedDict()
        )  # unsalted first key -> salt it was kept under

    def __len__(self) -> int:
        return len(self._block_of)

    def root(self, salt: str) -> bytes:
        """The parent of a first block: model identity and salt, lengths first so that they cannot blend."""
        salted = salt.encode()
        head = len(self._identity).to_bytes(4, "little") + len(salted).to_bytes(4, "little")
        return self._hash(head + self._identity + salted)

    def extend_keys(self, keys: list[bytes], token_ids: Sequence[int], salt: str, num_tokens: int) -> None:
        """Append the keys of the full blocks of the first ``num_tokens`` tokens that ``keys`` lacks."""
        size = self.block_size
        parent = keys[-1] if keys else self.root(salt)
        for index in range(len(keys), num_tokens // size):
            parent = self._hash(parent + _as_bytes(token_ids[index * size : (index + 1) * size]))
            keys.append(parent)

    def match(self, keys: list[bytes], token_ids: Sequence[int], salt: str) -> Match:
        """The longest kept chain of full blocks at the start of ``token_ids``.

        At least one token is always left to compute, because a next token needs its logits: a sequence of
        exactly n blocks matches at most n - 1. ``keys`` holds the sequence's keys so far and is extended.
        """
        size = self.block_size
        limit = (len(token_ids) - 1) // size
        blocks: list[int] = []
        host: list[tuple[int, int]] = []
        if limit < 1:
            return Match(blocks, host, 0, MISS_SHORT)
        self.extend_keys(keys, token_ids, salt, limit * size)
        parent = self.root(salt)
        reason = ""
        for index in range(limit):
            key = keys[index]
            block = self._block_of.get(key, NO_BLOCK)
            held = None
            if block != NO_BLOCK:
                entry = self._entries[block]
            elif self._host is not None and (held := self._host.get(key)) is not None:
                entry = held[1]
            else:
                reason = self._why_missing(key, index, token_ids, salt)
                break
            if entry.parent != parent or entry.tokens != _as_bytes(
                token_ids[index * size : (index + 1) * size]
            ):
                reason = MISS_NO_MATCH
                break
            blocks.append(block)
            if held is not None:
                host.append((index, held[0]))
            parent = key
        return Match(blocks, host, len(blocks) * size, reason)

    def insert(
        self, keys: Sequence[bytes], index: int, block: int, token_ids: Sequence[int], salt: str
    ) -> bool:
        """Keep ``block`` as block ``index`` of a sequence. False if its key already leads elsewhere."""
        key = keys[index]
        if key in self._block_of:
            return False
        if block in self._entries:
            raise LedgerError(f"block {block} already has a key")
        size = self.block_size
        parent = keys[index - 1] if index else self.root(salt)
        tokens = _as_bytes(token_ids[index * size : (index + 1) * size])
        self._block_of[key] = block
        self._entries[block] = Entry(key, parent, tokens)
        self._ghosts.pop(key, None)
        if index == 0:
            _remember(self._first_salt, self._hash(tokens), salt)
        return True

    def set_host(self, host: HostCache) -> None:
        """Look in this tier from now on."""
        self._host = host

    def entry(self, block: int) -> Entry:
        """What a keyed block holds."""
        return self._entries[block]

    def block_of(self, key: bytes) -> int:
        """The pool block under a key, or `NO_BLOCK`."""
        return self._block_of.get(key, NO_BLOCK)

    def restore(self, key: bytes, block: int) -> None:
        """``block`` is being filled from host memory with what lies there under ``key``."""
        held = self._host.get(key) if self._host is not None else None
        if held is None or key in self._block_of or block in self._entries:
            raise LedgerError(f"block {block} cannot be restored: not in host memory, or keyed already")
        self._block_of[key] = block
        self._entries[block] = held[1]
        self._ghosts.pop(key, None)

    def forget(self, block: int) -> None:
        """The pool gave up the block's content."""
        key = self._entries.pop(block).key
        del self._block_of[key]
        _remember(self._ghosts, key, None)

    def lost(self, key: bytes) -> None:
        """Host memory gave up the content under a key."""
        if key not in self._block_of:
            _remember(self._ghosts, key, None)

    def clear(self, pool: BlockPool) -> int:
        """Drop every key of the pool, so that cached blocks become free. Returns how many there were."""
        dropped = len(self._entries)
        for block in self._entries:
            pool.drop(block)
        self._entries.clear()
        self._block_of.clear()
        self._ghosts.clear()
        self._first_salt.clear()
        return dropped

    def keys(self) -> dict[int, bytes]:
        """A copy of block -> key, for checks and snapshots."""
        return {block: entry.key for block, entry in self._entries.items()}

    def check(self, pool: BlockPool) -> None:
        """Verify that keys and blocks are one to one and that the pool agrees. Raises LedgerError."""
        if len(self._block_of) != len(self._entries):
            raise LedgerError(f"{len(self._block_of)} keys but {len(self._entries)} keyed blocks")
        for block, entry in self._entries.items():
            if self._block_of.get(entry.key) != block or not pool.is_kept(block):
                raise LedgerError(f"block {block} and its key do not agree")
        if (kept := sum(map(pool.is_kept, range(pool.num_blocks)))) != len(self._entries):
            raise LedgerError(f"the pool keeps {kept} blocks, {len(self._entries)} have keys")

    def _why_missing(self, key: bytes, index: int, token_ids: Sequence[int], salt: str) -> str:
        if key in self._ghosts:
            return MISS_EVICTED
        if index == 0:
            first = self._hash(_as_bytes(token_ids[: self.block_size]))
            if self._first_salt.get(first, salt) != salt:
                return MISS_SALT
        return MISS_NO_MATCH


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as 32-bit integers of this machine's byte order."""
    return array("i", token_ids).tobytes()


def _remember(table: OrderedDict[bytes, V], key: bytes, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > MAX_GHOSTS:
        table.popitem(last=False)
