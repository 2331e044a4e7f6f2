"""The oracle's KV memory, written plainly: a pool of blocks, a radix tree over one, tiers below it.

Requests are oracle.Request's: here their text, tables, node and tree_tokens matter.
"""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Block:
    """A KV block: who holds it, and what text it is known to hold."""

    references: int = 0
    key: tuple | None = None
    step: int = -1  # in which it became full


class Pool:
    """vLLM's block pool. free: least recently used first. cached: blocks by what they hold, oldest first."""

    def __init__(self, num_blocks: int, tiers: "Tiers", unhashed_first: bool = False, through: bool = False):
        self.tiers, self.unhashed_first, self.through = tiers, unhashed_first, through
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free = list(self.blocks)
        self.cached: dict[tuple, list[Block]] = {}

    def take(self) -> Block:
        block = self.free.pop(0)
        if block.key is not None:
            self.cached[block.key].remove(block)
            if not self.cached[block.key]:
                del self.cached[block.key]
                if not self.through:
                    self.tiers.keep(block.key)
            block.key = None
        block.references = 1
        return block

    def take_piece(self, length: int, buddy: bool) -> list[Block] | None:
        """Neighbouring blocks, the lowest that are free; a buddy allocator's are a power of two at a multiple of it,
        where the fewest others are free with them."""

        def free(first: int, size: int) -> bool:
            piece = self.blocks[first : first + size]
            return len(piece) == size and all(block.references == 0 for block in piece)

        def whole_buddy(first: int) -> int:
            size = length
            while free(first // (2 * size) * (2 * size), 2 * size):
                size *= 2
            return size

        if buddy:
            length = next(2**i for i in range(64) if 2**i >= length)
        places = [first for first in range(0, len(self.blocks), length if buddy else 1) if free(first, length)]
        if not places:
            return None
        first = min(places, key=whole_buddy) if buddy else places[0]
        piece = self.blocks[first : first + length]
        for block in piece:
            self.touch(block)
        return piece

    def touch(self, block: Block) -> None:
        if block.references == 0:
            self.free.remove(block)
        block.references += 1

    def put_back(self, block: Block) -> None:
        block.references -= 1
        if block.references == 0:
            self.free.append(block)

    def put_back_all(self, blocks: list[Block]) -> None:
        """In the order in which they shall be given out."""
        for block in blocks:
            block.references -= 1
        freed = [block for block in blocks if block.references == 0]
        first = [block for block in freed if block.key is None and self.unhashed_first]
        self.free = first + self.free + [block for block in freed if block not in first]

    def enter(self, block: Block, key: tuple) -> None:
        assert block.key is None
        block.key = key
        self.cached.setdefault(key, []).append(block)

    def find(self, key: tuple) -> Block | None:
        return self.cached[key][0] if key in self.cached else None


@dataclass(eq=False)
class TreeNode:
    """A run of tokens that follow the parent's, and the blocks that hold their keys and values."""

    tokens: tuple = ()
    blocks: list[Block] = field(default_factory=list)
    parent: "TreeNode | None" = None
    children: list["TreeNode"] = field(default_factory=list)
    locks: int = 0  # requests whose text goes through it
    used: int = 0  # when it was last


class RadixPool:
    """SGLang's memory: every block is empty, or a request's own, or holds text in a tree (mem_cache/radix_cache.py).

    Its references are the requests that hold it. What a step lacks is borrowed until all its requests are known, then
    the least recently used leaves are evicted for it.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.blocks = [Block() for _ in range(num_blocks)]
        self.borrowed: list[Block] = []
        self.root = TreeNode()
        self.clock = 0

    def nodes(self, below: TreeNode | None = None) -> list[TreeNode]:
        children = (below or self.root).children
        return children + [node for child in children for node in self.nodes(child)]

    @property
    def free(self) -> list[Block]:
        """Blocks that nobody holds, text or not."""
        return [block for block in self.blocks if block.references == 0][len(self.borrowed) :]

    @property
    def empty(self) -> list[Block]:
        kept = {id(block) for node in self.nodes() for block in node.blocks}
        return [block for block in self.blocks if block.references == 0 and id(block) not in kept]

    def take(self) -> Block:
        if self.empty:
            block = self.empty[0]
        else:
            block = Block()
            self.borrowed.append(block)
        block.references = 1
        return block

    def settle(self) -> None:
        """Every borrowed block takes the place of an empty one."""
        while self.borrowed:
            if not self.empty:
                self.evict()
            self.blocks.remove(self.empty[0])
            self.blocks.append(self.borrowed.pop())

    def make_room(self, num_blocks: int) -> None:
        while len(self.empty) - len(self.borrowed) < num_blocks and self.evict():
            pass

    def evict(self) -> TreeNode | None:
        leaves = [node for node in self.nodes() if not node.children and node.locks == 0]
        leaf = min(leaves, key=lambda node: node.used, default=None)
        if leaf is not None:
            leaf.parent.children.remove(leaf)
        return leaf

    def match(self, tokens: tuple) -> tuple[TreeNode, int]:
        """The node with which the longest common beginning ends, cut off there if need be, and how long that is."""
        self.clock += 1
        now, node, length = self.clock, self.root, 0
        while True:
            for child in node.children:
                common = 0
                for own, other in zip(child.tokens, tokens[length:], strict=False):
                    if own != other:
                        break
                    common += 1
                common -= common % self.block_size
                if common > 0:
                    break
            else:
                return node, length
            child.used = now
            length += common
            if common < len(child.tokens):
                return self.split(child, common), length
            node = child

    def split(self, lower: TreeNode, length: int) -> TreeNode:
        self.clock += 1
        count = length // self.block_size
        upper = TreeNode(
            lower.tokens[:length], lower.blocks[:count], lower.parent, [lower], lower.locks, used=self.clock
        )
        lower.parent.children.remove(lower)
        lower.parent.children.append(upper)
        lower.tokens, lower.blocks, lower.parent = lower.tokens[length:], lower.blocks[count:], upper
        return upper

    def path(self, node: TreeNode | None) -> list[TreeNode]:
        return [] if node in (None, self.root) else [*self.path(node.parent), node]

    def lock(self, node: TreeNode | None, change: int = 1) -> None:
        for one in self.path(node):
            one.locks += change
            for block in one.blocks:
                block.references += change

    def insert(self, request, length: int) -> None:
        """A request's computed text enters the tree. Where that has the same text already, its own blocks are freed."""
        length -= length % self.block_size
        tokens, table = request.text(length), request.tables[0]
        before, after = request.tree_tokens // self.block_size, length // self.block_size
        node, known = self.match(tokens)
        for block in table[before:after]:
            block.references -= 1
        assert all(block.references == 0 for block in table[before:after])
        if known < length:
            self.clock += 1
            blocks = table[known // self.block_size : after]
            node.children.append(TreeNode(tokens[known:], blocks, node, used=self.clock))
        node, known = self.match(tokens)
        assert known == length
        self.lock(request.node, -1)
        self.lock(node)
        request.node, request.tree_tokens = node, length
        self.part_answer(request)
        table[:after] = [block for one in self.path(node) for block in one.blocks]

    def part_answer(self, request) -> None:
        """A node ends where the prompt does."""
        end, prompt = 0, request.prompt_tokens // self.block_size * self.block_size
        for node in self.path(request.node):
            begin, end = end, end + len(node.tokens)
            if begin < prompt < end:
                self.split(node, prompt - begin)

    def release(self, request) -> None:
        own = request.tree_tokens // self.block_size
        for block in (block for table in request.tables for block in table[own:]):
            block.references -= 1
        self.borrowed = [block for block in self.borrowed if block.references]  # it may have been given some this step
        self.lock(request.node, -1)
        request.node, request.tree_tokens = None, 0

    def check(self, requests: list) -> None:
        nodes = self.nodes()
        assert not self.borrowed
        for node in nodes:
            assert node.tokens
            assert len(node.blocks) * self.block_size == len(node.tokens)
            assert all(block.references == node.locks for block in node.blocks)
            assert node.locks == sum(node in self.path(r.node) for r in requests)
            first = [child.tokens[: self.block_size] for child in node.children]
            assert len(set(first)) == len(first)
        for r in requests:
            assert r.text(r.tree_tokens) == tuple(t for node in self.path(r.node) for t in node.tokens)
        kept = {id(block) for node in nodes for block in node.blocks}
        own = [id(b) for r in requests for t in r.tables for b in t[r.tree_tokens // self.block_size :]]
        empty = [id(block) for block in self.empty]
        assert sorted([*kept, *own, *empty]) == sorted(map(id, self.blocks))


STORE = 2


class Tiers:
    """What the GPU evicted: texts in the CPU's memory, and on the disk, each least recently used first."""

    def __init__(self, sizes: tuple[int, int]):
        self.sizes = sizes
        self.held: list[list[tuple]] = [[], []]

    def keep(self, key: tuple) -> None:
        """A text comes from above. The last of a full tier goes to the next one, that of the last one nowhere."""
        for held, size in zip(self.held, self.sizes, strict=True):
            if size == 0 or self.use(held, key):
                return
            held.append(key)
            if len(held) <= size:
                return
            key = held.pop(0)

    def use(self, held: list[tuple], key: tuple) -> bool:
        if key not in held:
            return False
        held.remove(key)
        held.append(key)
        return True

    def find(self, key: tuple) -> int | None:
        """The first tier that has it."""
        return next((tier for tier, held in enumerate(self.held) if key in held), None)
