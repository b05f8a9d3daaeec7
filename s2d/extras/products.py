"""Products of a few rows, done the way that is fastest on this machine.

Knows nothing about decoding. A pass over a few tokens reads every weight once, and takes as long as
that if the product is done the right way. Which way is right differs by processor, dtype and number
of rows, by up to ten times: so each is timed once for a model's shapes (costs.py). Besides,
products of one input are done at once: queries, keys and values; gate and up. Their weights then
lie in one memory; the model's names and values stay what they are.
"""

from bisect import bisect_left

import torch
import torch.nn.functional as F
from torch import nn

from ..model import MLP, Attention
from .costs import SIZES, kept, quickest, quickest_of_each, size_of, time_passes
from .draft_head import draft_head

MOST = 2049  # rows of a pass whose cost is asked for
LAID_OUT_FOR = 8  # rows; the layout for these is as good for 1 to 16
CACHED = 40e6  # bytes of a model that processors keep in their caches: its products stay plain
DTYPES = torch.float32, torch.bfloat16  # in which there is more than one way
BYTES = 48e6  # of weights that ways are timed with: more than caches hold


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
    """The library's, once the weight is ``laid_out`` for it; before that the plain one."""
    if not weight.is_mkldnn:
        return F.linear(x, weight)
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


def laid_out(weight):
    """A copy of ``weight`` (out, in) in the library's own layout."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LAID_OUT_FOR)


WAYS = {"by_linear": F.linear}
WAYS |= {way.__name__: way for way in (from_left, without_library, by_layout)}
PLAIN = ["by_linear"] * (len(SIZES) + 1)  # for each of SIZES, and for more rows


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


class Product(nn.Module):
    """An nn.Linear without bias; ``names``: the way, in WAYS, for each size as in PLAIN.

    Weights that learn or were changed (but by ``.data``, which nobody sees) are multiplied plainly,
    and so is what asks for a gradient. Casts and moves have all multiplied plainly from then on.
    """

    def __init__(self, weight, names=PLAIN):
        super().__init__()
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:  # made of parameters of the model
            self.register_buffer("weight", weight, persistent=False)
        self.names, self.packed, self.version = names, weight.detach(), version_of(weight)
        self.original = (weight,)  # in a tuple, as it is no second parameter

    def forward(self, x):
        if torch.compiler.is_compiling():  # there compiled.py decides, for all sizes at once
            return F.linear(x, self.packed if self.names[0] == "by_layout" else self.weight)
        if x.requires_grad or self.changed():
            return self.plain(x)
        name = self.names[bisect_left(SIZES, x.numel() // x.size(-1))]
        return WAYS[name](x, self.packed if name == "by_layout" else self.weight)

    def plain(self, x):
        return F.linear(x, self.weight)

    def changed(self):
        """Whether the weight learns, or was changed since."""
        weight, (original,) = self.weight, self.original
        known = weight is original and version_of(weight) == self.version
        return weight.requires_grad or not known

    def lay_out(self):
        """Make what ``by_layout`` needs, a second copy of the weight."""
        if "by_layout" in self.names and not self.packed.is_mkldnn:
            self.packed = laid_out(self.weight.detach())

    def _apply(self, function, recurse=True):
        before = self.weight.dtype, self.weight.device
        super()._apply(function, recurse)
        if before != (self.weight.dtype, self.weight.device):
            self.names, self.packed = PLAIN, self.weight.detach()
        return self

    def __getstate__(self):
        return self.__dict__ | {"packed": self.weight}  # a copy or a file lacks the layout


class Joint(Product):
    """Products of one input as one. The weights of ``linears`` become parts of its own."""

    def __init__(self, linears):
        super().__init__(torch.cat([linear.weight.detach() for linear in linears]))
        self.sizes = [len(linear.weight) for linear in linears]
        for linear, part in zip(linears, self.weight.split(self.sizes)):
            linear.weight = nn.Parameter(part, requires_grad=False)
        self.linears, self.originals = linears, [linear.weight for linear in linears]

    def plain(self, x):
        return torch.cat([F.linear(x, linear.weight) for linear in self.linears], dim=-1)

    def changed(self):
        return any(
            linear.weight is not part or part.requires_grad or version_of(part) != self.version
            for linear, part in zip(self.linears, self.originals)
        )


class Joined:
    """Of an Attention or an MLP: what it makes of its input is one product, ``joint``.

    The modules of the parts keep their weights, but are not called: their hooks are not, either.
    """

    def project(self, x):
        joint = self.joint
        return joint.forward(x).split(joint.sizes, dim=-1)


class JoinedAttention(Joined, Attention):
    """Queries, keys and values at once."""


class JoinedMLP(Joined, MLP):
    """Gate and up at once."""


def join(kind, config, former):
    """The ``kind`` of Joined with the weights of ``former``, whose last product stands alone."""
    with torch.device("meta"):
        module = kind(config)
    linears = dict(former.named_children())
    for name, linear in linears.items():
        setattr(module, name, linear)
    *first, last = linears
    module.joint = Joint([linears[name] for name in first])
    setattr(module, last, Product(linears[last].weight))
    return module


def join_block(block, config):
    block.self_attn = join(JoinedAttention, config, block.self_attn)
    block.mlp = join(JoinedMLP, config, block.mlp)


def products_of(module):
    return [each for each in module.modules() if isinstance(each, Product)]


def quicken(model):
    """Have the products of ``model``, on a CPU, go the fastest way there is here."""
    for block in model.model["layers"]:
        join_block(block, model.config)
    weights = [product.weight for product in products_of(model)]
    model.lm_head = Product(model.lm_head.weight)
    if head := draft_head(model):
        head.rows = Product(head.rows.weight)
    if model.dtype in DTYPES:
        names = quickest_ways(weights)
        for product in products_of(model):
            product.names = names


@torch.inference_mode()
def quickest_ways(weights):
    """The quickest ways of products with ``weights``, four a block, as in PLAIN."""
    blocks = -(-int(BYTES) // sum(weight.nbytes for weight in weights[:4]))
    weights = weights[: 4 * blocks]
    ways = possible_ways(weights[0].dtype)
    what = "ways", ways, [tuple(weight.shape) for weight in weights], weights[0].dtype
    best = quickest(kept(what, lambda: time_ways(ways, weights)))
    return [*best, "by_layout" if best[-1] == "by_layout" else "by_linear"]


def time_ways(ways, weights):
    """{way: seconds for each of SIZES} of products with all ``weights``, one after another."""
    cases, widths = {name: weights for name in ways}, {weight.shape[1] for weight in weights}
    if "by_layout" in cases:
        cases["by_layout"] = [laid_out(weight) for weight in weights]

    def products(name, rows):
        inputs = {width: weights[0].new_full((1, rows, width), 0.01) for width in widths}
        for weight in cases[name]:
            WAYS[name](inputs[weight.shape[1]], weight)

    by_size = [quickest_of_each(products, cases, rows) for rows in SIZES]
    return {name: [seconds[name] for seconds in by_size] for name in cases}


def lay_out(model):
    """Lay out what passes of several rows need: at most one more copy of the weights."""
    for product in products_of(model):
        product.lay_out()


def each_row(seconds):
    """Seconds of a pass over each of SIZES -> over 1, 2, ... MOST rows."""
    more = max(0.0, seconds[-1] - seconds[-2]) / (SIZES[-1] - SIZES[-2])  # of a row beyond these
    short = [seconds[size_of(rows)] for rows in range(1, SIZES[-1] + 1)]
    return short + [seconds[-1] + more * n for n in range(1, MOST - SIZES[-1] + 1)]


def row_costs(model):
    """Seconds of a pass of ``model``, laid out, over 1, 2, ... MOST rows; None if not known."""
    short = model.config.max_position_embeddings < 2 * SIZES[-1]
    if model.device.type != "cpu" or model.dtype not in DTYPES or model.mesh is not None or short:
        return None
    if model.row_costs is None:
        lay_out(model)
        what = "passes", model.config, model.dtype, getattr(model.lm_head, "names", None)
        model.row_costs = each_row(kept(what, lambda: {"pass": time_passes(model)})["pass"])
    return model.row_costs
