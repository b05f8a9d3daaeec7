"""Products of a few rows, done the way that is fastest on this machine.

Knows nothing about decoding. A pass over a few tokens reads every weight once, and takes as long as
that if the product is done the right way. Which way is right differs by processor, dtype and number
of rows, by up to ten times: so each is timed once for a model's shapes (costs.py). Besides,
products of one input are done at once: queries, keys and values; gate and up. Their weights then
lie in one memory; the model's names and values stay what they are.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..model import MLP, Attention
from .costs import SIZES, kept, padded, quickest_of_each, time_passes
from .draft_head import draft_head

MOST = 2049  # rows of a pass whose cost is asked for
LAID_OUT_FOR = 8  # rows; the layout for these is as good for 1 to 16
CACHED = 40e6  # bytes of a model that processors keep in their caches: its products stay plain
DTYPES = torch.float32, torch.bfloat16  # in which there is more than one way
BYTES = 48e6  # of weights that ways are timed with: more than caches hold


def by_linear(x, weight):
    return F.linear(x, weight)


def from_left(x, weight):
    """The weight times the rows as columns, which some libraries do faster; one row as two."""
    rows = x.reshape(-1, x.shape[-1])  # (T, in)
    columns = (torch.cat((rows, rows)) if len(rows) == 1 else rows).t()  # (in, T)
    return (weight @ columns).t()[: len(rows)].contiguous().view(*x.shape[:-1], -1)


def without_library(x, weight):
    """PyTorch's own product, which reads the weights of one row at the memory's speed."""
    former = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(x, weight)
    finally:
        torch._C._set_mkldnn_enabled(former)


def by_layout(x, weight):
    """The library's, for a weight in a layout of its own; of any other it makes that first."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def laid_out(weight):
    """A copy of ``weight`` (out, in) in the library's own layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LAID_OUT_FOR)


WAYS = {way.__name__: way for way in (by_linear, from_left, without_library, by_layout)}


def possible_ways(dtype):
    """The names in WAYS of what this processor and this PyTorch can do."""
    try:
        by_layout(torch.ones(2, 32, dtype=dtype), laid_out(torch.ones(32, 32, dtype=dtype)))
    except (RuntimeError, AttributeError):  # no such instructions; no such operation
        return [name for name in WAYS if name != "by_layout"]
    return list(WAYS)


def version_of(tensor):
    """It changes with the values; PyTorch does not count it of tensors made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


class Product(nn.Linear):
    """An nn.Linear without bias; ``names``: the way, in WAYS, for 0, 1, 2, ... rows.

    Until ``lay_out``, what goes ``by_layout`` is multiplied plainly. So are weights that learn or
    were cast or changed (but by ``.data``, which nobody sees), and what asks for a gradient.
    """

    def __init__(self, weight, names):
        super().__init__(*weight.shape[::-1], bias=False, device="meta")
        self.weight, self.packed = weight, weight.detach()
        self.names, self.version = names, version_of(weight)
        self.ways = [WAYS["by_linear" if name == "by_layout" else name] for name in names]
        self.many, self.original = by_linear, (weight,)

    def forward(self, x):
        rows = x.numel() // self.in_features
        if torch.compiler.is_compiling() and rows < len(self.names):  # there compiled.py decides
            return F.linear(x, self.packed if self.names[rows] == "by_layout" else self.weight)
        if x.requires_grad or self.changed():
            return F.linear(x, self.weight)
        return self.multiply(x, rows)

    def multiply(self, x, rows):
        """The product of so many rows, the quickest way."""
        way = self.ways[rows] if rows < len(self.ways) else self.many
        return way(x, self.packed if way is by_layout else self.weight)

    def changed(self):
        """Whether the weight learns, or was changed since."""
        weight = self.weight
        known = weight is self.original[0] and version_of(weight) == self.version
        return weight.requires_grad or not known

    def _apply(self, function, recurse=True):
        """Casts and moves: what was laid out is not, then."""
        before = self.weight.dtype, self.weight.device
        super()._apply(function, recurse)
        if before != (self.weight.dtype, self.weight.device):
            self.packed, self.many = self.weight.detach(), by_linear
            self.names, self.ways = (["by_linear"] * len(self.names), [by_linear] * len(self.names))
        return self

    def lay_out(self):
        """Make what ``by_layout`` needs, a second copy of the weight."""
        if "by_layout" in self.names and not self.packed.is_mkldnn:
            self.packed = laid_out(self.weight.detach())
            self.ways = [WAYS[name] for name in self.names]
            self.many = by_layout if self.ways[-1] is by_layout else by_linear


class Fixed(Product):
    """A Product whose weight is no parameter of the model: it is made of some."""

    def __init__(self, weight, names):
        super().__init__(nn.Parameter(weight, requires_grad=False), names)
        del self.weight
        self.register_buffer("weight", weight, persistent=False)
        self.original = (weight,)


class Joint(Fixed):
    """Products of one input as one. The weights of ``linears`` become parts of its own."""

    def __init__(self, linears, names):
        weight = torch.cat([linear.weight.detach() for linear in linears])
        super().__init__(weight, names)
        self.sizes, self.linears = [len(linear.weight) for linear in linears], linears
        for linear, part in zip(linears, weight.split(self.sizes)):
            linear.weight = nn.Parameter(part, requires_grad=False)
        self.parts = [linear.weight for linear in linears]

    def changed(self):
        """Whether a part learns, was changed or is another one: then this weight does not serve."""
        return any(
            linear.weight is not part or part.requires_grad or version_of(part) != self.version
            for linear, part in zip(self.linears, self.parts)
        )


class Joined:
    """Of an Attention or an MLP: what it makes of its input is one product, ``joint``."""

    def project(self, x):
        joint = self.joint
        if torch.compiler.is_compiling():
            return joint(x).split(joint.sizes, dim=-1)
        if x.requires_grad or joint.changed():
            return super().project(x)
        return joint.multiply(x, x.numel() // joint.in_features).split(joint.sizes, dim=-1)


class JoinedAttention(Joined, Attention):
    """Queries, keys and values at once."""


class JoinedMLP(Joined, MLP):
    """Gate and up at once."""


def join(kind, config, former, names):
    """The ``kind`` of Joined with the weights of ``former``, whose last product stands alone."""
    with torch.device("meta"):
        module = kind(config)
    linears = dict(former.named_children())
    for name, linear in linears.items():
        setattr(module, name, linear)
    *first, last = linears
    module.joint = Joint([linears[name] for name in first], names)
    setattr(module, last, Product(linears[last].weight, names))
    return module


def quicken_block(block, config, names):
    block.self_attn = join(JoinedAttention, config, block.self_attn, names)
    block.mlp = join(JoinedMLP, config, block.mlp, names)


def quicken(model):
    """Have the products of ``model``, on a CPU, go the fastest way there is here."""
    shapes, layers = product_shapes(model.model["layers"][0]), len(model.model["layers"])
    what, timed = ("ways", shapes, layers, model.dtype), {"by_linear": [1.0] * len(SIZES)}
    if model.dtype in DTYPES:
        ways = possible_ways(model.dtype)
        timed = kept(what, ways, lambda: time_ways(shapes, layers, model.dtype))
    names = quickest(timed)
    for block in model.model["layers"]:
        quicken_block(block, model.config, names)
    model.lm_head = Product(model.lm_head.weight, names)
    if head := draft_head(model):
        head.rows = Fixed(head.rows.weight, names)


def quickest(timed):
    """{way: seconds for each of SIZES} -> the quickest for 0, 1, ... rows."""
    best = [min(timed, key=lambda way: timed[way][i]) for i in range(len(SIZES))]
    rest = [best[SIZES.index(padded(rows))] for rows in range(1, SIZES[-1] + 1)]
    return ["by_linear", *rest]


def product_shapes(block):
    """(out, in) of the four products of a block once they are ``Joined``."""
    shapes = []
    for part in (block.self_attn, block.mlp):
        *first, last = (linear.weight.shape for linear in part.children())
        shapes += [(sum(shape[0] for shape in first), first[0][1]), tuple(last)]
    return shapes


@torch.inference_mode()
def time_ways(shapes, layers, dtype):
    """{way: seconds for each of SIZES} of products with weights of ``shapes`` in some layers."""
    size = sum(out * inner for out, inner in shapes) * dtype.itemsize
    count = min(layers, -(-int(BYTES) // size))
    weights = [torch.full(shape, 0.01, dtype=dtype) for shape in shapes * count]
    cases = {name: weights for name in possible_ways(dtype)}
    if "by_layout" in cases:
        cases["by_layout"] = [laid_out(weight) for weight in weights]

    def products(name, rows):
        inputs = {inner: torch.full((1, rows, inner), 0.01, dtype=dtype) for _, inner in shapes}
        for weight in cases[name]:
            WAYS[name](inputs[weight.shape[1]], weight)

    by_rows = [quickest_of_each(products, cases, rows) for rows in SIZES]
    return {name: [seconds[name] for seconds in by_rows] for name in cases}


def lay_out(model):
    """Lay out what passes of several rows need: at most one more copy of the weights."""
    for module in model.modules():
        if isinstance(module, Product):
            module.lay_out()


def row_costs(model):
    """Seconds of a pass of ``model``, laid out, over 1, 2, ... MOST rows; None if not known."""
    short = model.config.max_position_embeddings < 2 * SIZES[-1]
    if model.device.type != "cpu" or model.dtype not in DTYPES or model.mesh is not None or short:
        return None
    if model.row_costs is None:
        lay_out(model)
        ways = getattr(model.lm_head, "names", None)
        what = "passes", model.config, model.dtype, model.compiled, ways
        timed = kept(what, ["pass"], lambda: {"pass": time_passes(model)})["pass"]
        each = max(0.0, timed[-1] - timed[-2]) / (SIZES[-1] - SIZES[-2])  # of a row beyond these
        more = [timed[-1] + each * n for n in range(1, MOST - SIZES[-1] + 1)]
        model.row_costs = [timed[SIZES.index(padded(n))] for n in range(1, SIZES[-1] + 1)] + more
    return model.row_costs
