"""Where each request's keys and values lie, and how they get there: pool, prefix cache and host memory.

Three places hold blocks: the KV pool, host memory for evicted prefixes, and host memory for preempted
requests (swap space). This file moves blocks between them by id. The copies themselves are queued and made by
the runner, in order, before the next step computes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from engine.admission import Grant
from engine.block_pool import OWNER_MODULUS, BlockPool, BlockView, LedgerError
from engine.host_arena import CopyQueue, HostArena
from engine.host_cache import HostCache
from engine.plan import Copy
from engine.prefix_cache import MISS_OFF, Match, PrefixCache
from engine.request import NO_BLOCK, Request, Swapped
from engine.sizes import counted
from ipc.messages import BLOCK_FREE, BLOCK_HOST, BLOCK_SWAPPED


class KVManager:
    """Blocks of one pool and of the host memory behind it. Not thread-safe: the step thread owns it.

    ``window`` is the largest attention window over all layers; blocks wholly outside it are given back. None
    keeps every block: some layer sees everything, or requests lie in runs of neighbouring blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        identity: str,
        window: int | None = None,
        num_prefix_blocks: int = 0,
        num_swap_blocks: int = 0,
    ) -> None:
        self.window = window
        self.copies = CopyQueue()
        self.host = HostCache(num_prefix_blocks, self.copies, self._lost)
        self.cache = PrefixCache(identity, block_size, host=self.host)
        self.pool = BlockPool(num_blocks, block_size, self._evict)
        self.swap_space = HostArena("swap", num_swap_blocks, self.copies)
        self.swapped: dict[int, Request] = {}  # by request id, those that wait with blocks in swap space

    def lead(self, num_computed: int) -> int:
        """Leading blocks that no token from position ``num_computed`` on looks at."""
        if self.window is None:
            return 0
        return max(0, num_computed + 1 - self.window) // self.pool.block_size

    def find(self, request: Request, *, prefix_cache: bool) -> Match:
        """What there is of a waiting request's tokens, in the pool and in host memory."""
        match = Match([], [], 0, MISS_OFF)
        if prefix_cache:
            match = self.cache.match(request.block_keys, request.token_ids, request.cache_salt)
        swap = request.swap
        if swap is None or match.num_tokens >= swap.num_tokens:
            return match
        found = match.blocks + [NO_BLOCK] * (len(swap.host_blocks) - len(match.blocks))
        host = [(i, swap.host_blocks[i]) for i, block in enumerate(found) if block == NO_BLOCK]
        return Match(found, host, swap.num_tokens, match.miss_reason, "swap")

    def without_pool(self, request: Request, match: Match) -> Match:
        """What is left of a match where blocks of the pool cannot be shared."""
        if (swap := request.swap) is None:
            return Match([], [], 0, match.miss_reason)
        blocks = [NO_BLOCK] * len(swap.host_blocks)
        return Match(blocks, list(enumerate(swap.host_blocks)), swap.num_tokens, match.miss_reason, "swap")

    def place(self, request: Request, grant: Grant) -> int:
        """Give a starting request its blocks. Returns how many of its tokens are copied from host memory."""
        match, table, size = grant.match, grant.blocks, self.pool.block_size
        lead = self.lead(match.num_tokens)
        copied = 0
        for index, host_block in match.host:
            if index < lead:
                continue
            end = min((index + 1) * size, match.num_tokens)
            self.copies.add(match.arena, "in", table[index], host_block)
            self.pool.write(table, index * size, end)
            copied += end - index * size
            if match.arena == "prefix":
                key = request.block_keys[index]
                self.host.touch(key)
                self.cache.restore(key, table[index])
                self.pool.keep(table[index])
        if lead:  # what is outside the window stays as fresh as what it leads to
            self.pool.touch(block for block in reversed(match.blocks[:lead]) if block != NO_BLOCK)
        request.block_table = table
        request.num_computed = match.num_tokens
        request.num_keyed = 0 if match.arena == "swap" else len(match.blocks)
        self.forget_swapped(request)
        return copied

    def keep_full_blocks(self, request: Request) -> None:
        """Offer a request's full blocks to later ones."""
        size, table = self.pool.block_size, request.block_table
        full = request.num_computed // size
        keys, ids, salt = request.block_keys, request.token_ids, request.cache_salt
        self.cache.extend_keys(keys, ids, salt, full * size)
        for index in range(request.num_keyed, full):
            block = table[index]
            if block != NO_BLOCK and self.cache.insert(keys, index, block, ids, salt):
                self.pool.keep(block)
        request.num_keyed = full

    def release_outside(self, request: Request, first: int) -> list[int]:
        """Give back the blocks from index ``first`` on that a request's window has left. Returns them."""
        last = self.lead(request.num_computed)
        blocks = request.block_table[first:last]
        self.pool.release(blocks)
        request.block_table[first:last] = [NO_BLOCK] * (last - first)
        return blocks

    def leave(self, request: Request) -> list[int]:
        """Give back all blocks of a running request. Returns its table as it was."""
        table = request.block_table
        self.pool.release(request.held_blocks)
        if table and table[0] == NO_BLOCK:  # a chain's tail is evicted before its head
            lead = [self.cache.block_of(key) for key in request.block_keys[: table.count(NO_BLOCK)]]
            self.pool.touch(block for block in reversed(lead) if block != NO_BLOCK)
        request.block_table = []
        request.num_keyed = 0
        return table

    def swap_out(self, request: Request) -> str:
        """Order a running request's blocks to be copied to swap space. Says why not, "" if it is done."""
        used = -(-request.num_computed // self.pool.block_size)
        table = request.block_table[:used]
        blocks = [block for block in table if block != NO_BLOCK]
        if not blocks:
            return "nothing of it was computed yet"
        space = self.swap_space
        host_blocks = space.allocate(len(blocks))
        if host_blocks is None:
            blocks_do = f"{counted(len(blocks), 'block')} {'does' if len(blocks) == 1 else 'do'}"
            return f"{blocks_do} not fit: swap space has {space.num_free} of {space.num_blocks} free"
        for block, host_block in zip(blocks, host_blocks, strict=True):
            self.copies.add("swap", "out", block, host_block)
        request.swap = Swapped([NO_BLOCK] * (used - len(blocks)) + host_blocks, request.num_computed)
        self.swapped[request.rid] = request
        return ""

    def forget_swapped(self, request: Request) -> int:
        """Free what a request holds in swap space. Returns how many tokens that were."""
        if (swap := request.swap) is None:
            return 0
        self.swap_space.release([block for block, _num_tokens in self._swapped_blocks(request)])
        request.swap = None
        del self.swapped[request.rid]
        return swap.num_tokens

    def forget(self, block: int) -> None:
        """Nobody finds this block of the pool any more."""
        self.cache.forget(block)
        self.pool.drop(block)

    def distrust(self, request: Request) -> None:
        """Nobody finds what this request computed or shared any more, wherever it lies."""
        for block in request.held_blocks:
            if self.pool.is_kept(block):
                self.forget(block)
        for key in request.block_keys[: request.high_water // self.pool.block_size]:
            self.host.forget(key)
            if (block := self.cache.block_of(key)) != NO_BLOCK:
                self.forget(block)

    def clear_prefixes(self) -> None:
        """Drop every key, in the pool and in host memory."""
        self.cache.clear(self.pool)
        self.host.clear()

    def resize_prefix(self, num_blocks: int) -> None:
        """Start over with an arena of another size for evicted prefixes."""
        self.host = HostCache(num_blocks, self.copies, self._lost)
        self.cache.set_host(self.host)
        self.copies.drop("prefix")

    def resize_swap(self, num_blocks: int) -> None:
        """Start over with swap space of another size. Nobody may have blocks there any more."""
        self.copies.drop("swap")
        self.swap_space = HostArena("swap", num_blocks, self.copies)

    def take_copies(self) -> list[Copy]:
        """All copies that were ordered since the last call, in the order in which they must be made."""
        taken = self.copies.take()
        self.host.arena.settle()
        self.swap_space.settle()
        return taken

    def view(self, t_ns: int) -> BlockView:
        """The pool's map, then the prefix arena, then the swap space."""
        view = self.pool.view(t_ns)
        prefix, swap = self.host.arena.num_blocks, self.swap_space.num_blocks
        if not prefix + swap:
            return view
        state = np.full(prefix + swap, BLOCK_FREE, np.uint8)
        fill = np.zeros(prefix + swap, np.uint16)
        owner = np.zeros(prefix + swap, np.uint32)
        held = [block for block, _entry in self.host]
        state[held], fill[held] = BLOCK_HOST, self.pool.block_size
        for rid, request in self.swapped.items():
            for block, num_tokens in self._swapped_blocks(request):
                state[prefix + block] = BLOCK_SWAPPED
                fill[prefix + block] = num_tokens
                owner[prefix + block] = rid % OWNER_MODULUS
        return BlockView(
            t_ns,
            view.block_size,
            np.concatenate((view.state, state)),
            np.concatenate((view.fill, fill)),
            np.concatenate((view.owner, owner)),
            prefix + swap,
        )

    def check(self) -> None:
        """Verify keys and host memory. Raises LedgerError."""
        self.cache.check(self.pool)
        self.host.check()
        held: list[int] = []
        for rid, request in self.swapped.items():
            if request.swap is None or request.rid != rid or request.is_running:
                raise LedgerError(f"request {rid} is counted as swapped but holds no swap space, or runs")
            held += [block for block, _num_tokens in self._swapped_blocks(request)]
        self.swap_space.check(held)

    def _swapped_blocks(self, request: Request) -> Iterator[tuple[int, int]]:
        """Blocks that a request holds in swap space, with the tokens in each."""
        swap, size = request.swap, self.pool.block_size
        if swap is not None:
            for index, block in enumerate(swap.host_blocks):
                if block != NO_BLOCK:
                    yield block, min(swap.num_tokens - index * size, size)

    def _evict(self, block: int) -> None:
        """The pool gives up a cached block: its content goes to host memory if there is room."""
        host_block = self.host.put(self.cache.entry(block))
        if host_block is not None:
            self.copies.add("prefix", "out", block, host_block)
        self.cache.forget(block)

    def _lost(self, key: bytes) -> None:
        self.cache.lost(key)
