"""``sizes="auto"``: who answers the calls of a layer at its first, its second and its frequent sizes while
processes compile. Kernels are the interpreter's, which count as compiled when a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import transconv
import transconv.functional as TF
from bench.faked_launches import as_on_gpu
from tests.torch_ops.test_ready import Machine, machine, sized  # noqa: F401  (fixtures)
from transconv import quantized
from transconv.calls import size_policy
from transconv.calls.settings import Settings
from transconv.calls.size_policy import ROUNDS, SizeChoice, SizeTrial, policy
from transconv.conv import compiler
from transconv.runtime import Registry
from transconv.torch_ops import functional
from transconv.torch_ops.calls import select_impl

OFTEN = 4  # calls until a size is one that comes often
SIDES = (5, 6, 7)  # the layer's first size, and two others
W, B = torch.randn(4, 4, 3, 3), torch.randn(4)
Q = torch.randint(-8, 8, W.shape, dtype=torch.int8)


@pytest.fixture(autouse=True)
def auto(sized: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(size_policy, "OFTEN", OFTEN)
    monkeypatch.setattr(compiler, "EXAMPLES", {2: compiler.EXAMPLES[2][:1]})  # plans take a while to make
    transconv.config.sizes = "auto"
    yield sized
    policy.forget()


def answers() -> dict[str, int]:
    """Who answered since the last look: kernels by what they compute, torch while it waited."""
    found = transconv.stats(reset=True)
    assert not found.fallback
    return found.native | ({"torch": found.waiting} if found.waiting else {})


def image(side: int) -> torch.Tensor:
    return torch.randn(1, 4, side, side)


def answer(sized: Machine) -> None:
    """The processes have done what they were given."""
    sized.processes.answer(kernels=1, seconds=0.0)


CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any], str]] = {
    "conv2d": (lambda x: transconv.conv2d(x, W, B), lambda x: torch.conv2d(x, W, B), "fwd"),
    "fused": (
        lambda x: transconv.fused_conv2d(x, W, B, activation="relu"),
        lambda x: torch.conv2d(x, W, B).relu(),
        "fwd",
    ),
    "quantized": (
        lambda x: quantized.conv2d((8 * x).to(torch.int8), Q, output_dtype=torch.int32),
        lambda x: torch.conv2d((8 * x).to(torch.int8).int(), Q.int()),
        "fwd",
    ),
    "softmax": (lambda x: TF.softmax(x, -1), lambda x: torch.softmax(x, -1), "softmax"),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", CALLS)
def test_torch_then_any_size_then_its_own_kernel(
    sized: Machine, name: str, recwarn: pytest.WarningsRecorder
) -> None:
    ours, theirs, does = CALLS[name]
    transconv.config.fallback = "warn"

    def call(side: int, times: int) -> dict[str, int]:
        for _ in range(times):
            x = image(side)
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-3)
        return answers()

    first, second, third = SIDES
    assert call(first, 3) == {"torch": 3}
    sized.finish()
    assert call(first, 3) == {does: 3}
    sized.compiled = False  # what is compiled from here on is not there yet
    assert call(second, 3) == {"torch": 3}
    assert all("=" in job["problem"] or "?" in job["problem"] for job, _ in sized.processes.jobs)
    sized.general = True
    answer(sized)
    assert call(second, 2) == call(third, 2) == {f"{does} any size": 2}
    assert call(first, 1) == {does: 1} and not sized.processes.jobs
    # A size that comes often: kernels for any size stand in while its own is compiled.
    assert call(second, OFTEN) == {f"{does} any size": OFTEN}
    assert len(sized.processes.jobs) == 1
    sized.finish()
    assert call(second, 3) == {does: 3}
    sized.compiled = False
    assert call(third, 1) == {f"{does} any size": 1}
    assert not [w for w in recwarn if w.category is transconv.FallbackWarning]


@pytest.mark.slow
def test_gradients_follow(sized: Machine) -> None:
    """The gradient of a sum is expanded: it is copied, for kernels that other gradients use, too."""

    def step(side: int, times: int) -> dict[str, int]:
        for _ in range(times):
            given = image(side).requires_grad_(), W.clone().requires_grad_()
            found = torch.autograd.grad(transconv.conv2d(*given).sum(), given)
            want = torch.autograd.grad(torch.conv2d(*given).sum(), given)
            torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
        return answers()

    first, second, third = SIDES
    own, general = ({name + end: 1 for name in ("fwd", "bwd_d", "bwd_w")} for end in ("", " any size"))
    assert step(first, 1) == {"torch": 1}  # and its own gradients
    sized.finish()
    assert step(first, 1) == own
    sized.compiled = False
    assert step(second, 1) == {"torch": 3}
    sized.general = True
    answer(sized)
    assert step(second, 1) == step(third, 1) == general
    found = step(second, OFTEN)
    assert found == dict.fromkeys(general, OFTEN) and len(sized.processes.jobs) == 3
    sized.finish()
    assert step(second, 1) == own
    sized.compiled = False
    assert step(third, 1) == general


@pytest.mark.parametrize("name", ["conv2d", "fused", "softmax"])
def test_a_kernel_for_any_size_stands_in_at_the_first_size(sized: Machine, name: str) -> None:
    """That of the first size is compiled behind those which answer all sizes."""
    ours, theirs, does = CALLS[name]
    first, second, _ = SIDES

    def call(side: int) -> dict[str, int]:
        x = image(side)
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-3)
        return answers()

    assert call(first) == call(first) == call(second) == {"torch": 1}
    sized.general = True
    (own,) = [asked for asked in sized.processes.jobs if asked[0].get("one_size")]
    sized.processes.jobs.remove(own)
    answer(sized)
    assert call(second) == call(first) == call(first) == {f"{does} any size": 1}
    sized.processes.jobs.append(own)
    sized.finish()
    assert call(first) == {does: 1}


def test_calls_that_wait_are_torchs_own(sized: Machine) -> None:
    """The first call of a further size asks for the kernels of its gradients, too; those behind it leave
    no work of ours in the backward pass."""
    w = W.clone().requires_grad_()

    def step(side: int) -> str:
        x = image(side)
        y, want = transconv.conv2d(x, w), torch.conv2d(x, w)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(*(torch.autograd.grad(f.sum(), w) for f in (y, want)))
        return type(y.grad_fn).__name__

    first, second, third = SIDES
    assert step(first) == step(first) == "ConvolutionBackward0"
    asked = [step(second), step(third)]
    assert asked == ["ConvolutionFunctionBackward"] * 2
    jobs = [job for job, _ in sized.processes.jobs]
    assert {job["direction"] for job in jobs if job.get("any_size")} == {"fwd", "bwd_w"}
    assert {job["direction"] for job in jobs if job.get("one_size")} == {"fwd", "bwd_w"}
    assert step(second) == step(third) == "ConvolutionBackward0"
    sized.general = True
    answer(sized)
    assert step(second) == "ConvolutionFunctionBackward"
    assert answers() == {"torch": 8, "fwd any size": 1, "bwd_w any size": 1}


def test_an_image_with_gaps_is_copied_at_further_sizes(sized: Machine) -> None:
    sized.finish()
    sized.compiled = sized.general = True
    transconv.conv2d(image(SIDES[0]), W)
    sized.compiled = False
    x = image(2 * SIDES[1])[..., ::2, ::2]
    torch.testing.assert_close(transconv.conv2d(x, W), torch.conv2d(x, W), rtol=1e-3, atol=1e-3)
    assert answers() == {"fwd": 1, "fwd any size": 1} and not sized.processes.jobs


def test_a_size_that_is_compiled_already_has_its_own_kernel(sized: Machine) -> None:
    sized.compiled = True
    for side in SIDES:
        transconv.conv2d(image(side), W)
    assert answers() == {"fwd": 3} and not sized.processes.jobs


@pytest.mark.every(2)
@pytest.mark.parametrize("fixed", ["steady", "deterministic", "fallback", "graph"])
def test_what_is_fixed_waits_for_kernels_of_its_own(sized: Machine, fixed: str) -> None:
    sized.general = True
    if fixed == "steady":
        transconv.config.steady = True
    elif fixed == "fallback":
        transconv.config.fallback = "error"
    torch.use_deterministic_algorithms(fixed == "deterministic")
    try:
        for side in SIDES:
            if fixed == "graph":
                torch.ops.transconv.convolution(
                    image(side), W, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
                )
            else:
                transconv.conv2d(image(side), W)
    finally:
        torch.use_deterministic_algorithms(False)
        transconv.config.steady = False
    assert answers() == {"fwd": 3} and not sized.processes.jobs


def test_prepared_sizes_have_their_own_kernels(sized: Machine) -> None:
    layer = torch.nn.Conv2d(4, 4, 3)
    transconv.convert_(layer)
    sized.compiled = True  # all of them were
    sizes = [(n, n) for n in SIDES[1:]]
    transconv.prepare(layer, image(SIDES[0]), sizes=sizes, backward=False, progress=False)
    sized.compiled = False
    for side in SIDES:
        layer(image(side))
    assert answers() == {"torch": 3}
    assert not any("?" in job["problem"] for job, _ in sized.processes.jobs), "none is asked for any size"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_auto_is_synchronous_without_a_gpu() -> None:
    made = Settings()
    assert (made.compile, made.sizes, made.steady) == ("auto", "auto", False)
    assert made.mode == "now" and not made.varies


# -- timing two kernels in the program's calls --------------------------------------------------------


class Clock:
    """A stream whose time goes on when something is launched in it, and whose events the host sees when
    it is told to."""

    def __init__(self) -> None:
        self.spent, self.seen = 0.0, True

    @property
    def now(self) -> float:
        return self.spent

    def launch(self, ms: float) -> Callable[[], float]:
        def run() -> float:
            self.spent += ms
            return ms

        return run

    def mark(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, -1.0

    def record(self) -> None:
        self.at = self.clock.now

    def query(self) -> bool:
        return self.clock.seen

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("own_ms", "other_ms", "taken"), [(1.0, 2.0, True), (1.5, 1.0, False), (1.0, 1.0, True)]
)
def test_a_trial_takes_what_was_faster(own_ms: float, other_ms: float, taken: bool) -> None:
    clock = Clock()
    clock.seen = False
    choice: SizeChoice = policy.choices("layer", "trial").of((1,))
    choice.own, choice.settled = True, False
    trial = SizeTrial(choice, clock.mark)
    run = trial.alternating(clock.launch(own_ms), clock.launch(other_ms))
    made = [run() for _ in range(2 * ROUNDS)]
    assert made == [own_ms, other_ms] * ROUNDS
    assert not trial.over(), "nothing waits for the GPU"
    assert run() == own_ms and not choice.settled
    clock.seen = True
    assert trial.over() and choice.settled and choice.own is taken


@pytest.mark.every(2)
@pytest.mark.parametrize("faster", ["own", "any size"])
def test_as_on_a_gpu_the_faster_kernel_stays(
    sized: Machine, faster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module's warm calls: sizes that come seldom, one that comes often, and the first one."""
    first, often, *seldom = range(8, 16)
    model = torch.nn.Conv2d(8, 8, 3, bias=False)
    transconv.convert_(model)

    with as_on_gpu() as launched, torch.no_grad():
        transconv.config.sizes, transconv.config.fallback = "auto", "silent"
        sized.compiled = sized.general = True

        class After(Clock):
            """Behind what was launched so far. Kernels for any size end in their sizes as arguments."""

            @property
            def now(self) -> float:
                general = [one[-3:] == (2, often, often) for one in launched]
                return sum(2.0 if is_any is (faster == "own") else 1.0 for is_any in general)

        clock = After()
        monkeypatch.setattr(size_policy, "_event", clock.mark)

        def call(side: int, times: int) -> dict[str, int]:
            for _ in range(times):
                before = len(launched)
                model(torch.randn(2, 8, side, side))
                assert len(launched) == before + 1
            return answers()

        assert call(first, 4) == {"fwd": 4}
        sized.compiled = False
        assert call(often, OFTEN) == {"fwd any size": OFTEN} and not sized.processes.jobs
        for side in seldom:
            assert call(side, 1) == {"fwd any size": 1}, "of a new size, too"
        assert call(often, 4) == {"fwd any size": 4}, "its own is being compiled"
        assert len(sized.processes.jobs) == 1
        sized.finish()
        trial = call(often, 2 * ROUNDS + 1)  # the first one of them is not timed
        assert trial == {"fwd": ROUNDS + 1, "fwd any size": ROUNDS}
        stays = "fwd" + " any size" * (faster == "any size")
        assert call(often, 9) == {stays: 9}
        sized.compiled = False
        assert call(first, 9) == {"fwd": 9} and call(seldom[0], 1) == {"fwd any size": 1}
        assert call(often, 9) == {stays: 9}
        monkeypatch.setattr(functional, "requested", lambda *_: pytest.fail("not by the layer's entry"))
        for side in (often, first, *seldom):
            call(side, 1)


@pytest.mark.slow
def test_as_on_a_gpu_each_direction_has_its_choice(
    sized: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.randn(8, 8, 3, 3, requires_grad=True)
    first, often, *seldom = range(8, 13)
    monkeypatch.setattr(size_policy, "_event", Clock().mark)  # all take the same time

    def step(side: int, times: int, odd: bool = False) -> dict[str, int]:
        for _ in range(times):
            x = torch.randn(2, 8, side, side, requires_grad=True)
            y = transconv.conv2d(x, w)
            grad = torch.ones(()).expand_as(y) if odd else torch.ones_like(y)
            torch.autograd.grad(y, (x, w), grad)
        return answers()

    with as_on_gpu():
        transconv.config.sizes, transconv.config.fallback = "auto", "silent"
        sized.compiled = sized.general = True
        own, general = ({f"{n}{end}" for n in ("fwd", "bwd_d", "bwd_w")} for end in ("", " any size"))
        assert step(first, 5).keys() == own
        for known in policy._choices.values():
            known.prepared = False  # as if further kernels were not compiled already
        assert [step(side, 2).keys() for side in (often, *seldom)] == [general] * 4
        assert step(seldom[0], 1, odd=True).keys() == general
        step(often, 3 * OFTEN + 4 * ROUNDS)
        assert step(often, 5).keys() == step(first, 5).keys() == own
        assert [step(side, 1).keys() for side in seldom] == [general] * 3
        monkeypatch.setattr(functional, "gradients", lambda *_: pytest.fail("not by an entry"))
        for side in (often, first, *seldom):
            step(side, 1)


def test_a_search_at_first_calls_waits_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(transconv.config, "compile", "auto")
        assert transconv.config.mode == "background"
        with torch.backends.cudnn.flags(benchmark=True):
            assert transconv.config.mode == "now"


@pytest.mark.parametrize(
    "wanted", ["both", *(pytest.param(name, marks=pytest.mark.slow) for name in ("input", "weight"))]
)
def test_gradients_by_key_are_torchs(sized: Machine, monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    """While further kernels of a layer are compiled, gradients of known sizes go no general way; all are
    compared, those of expanded gradients and of other strides, too."""
    look, waits = Registry._look, [lambda: False]
    monkeypatch.setattr(Registry, "is_settled", lambda self: False)
    monkeypatch.setattr(Registry, "_look", lambda self, *given: (look(self, *given)[0], waits))
    monkeypatch.setattr(size_policy.SizeChoices, "prepared", property(lambda self: False, lambda *_: None))
    monkeypatch.setattr(size_policy, "OFTEN", 1 << 30)
    sized.compiled = sized.general = True
    asked = list[Any]()
    routes = select_impl.backward_routes
    monkeypatch.setattr(select_impl, "backward_routes", lambda *a: asked.append(a) or routes(*a))
    w = W.clone().requires_grad_(wanted != "input")
    for turn in range(9):
        asked.clear()
        for side in (5, 6, 7, 9, 12):
            x = image(side).requires_grad_(wanted != "weight")
            given = [t for t in (x, w) if t.requires_grad]
            y, want = (
                transconv.conv2d(x, w, B, padding=1),
                torch.conv2d(x.double(), w.double(), B.double(), padding=1),
            )
            grad = torch.randn(y.shape)
            if turn == 1:
                grad = grad.to(memory_format=torch.channels_last)
            elif turn in (3, 5):
                grad = grad[:, :1].expand_as(y)
            theirs = torch.autograd.grad(want, given, grad.double())
            for made, other in zip(torch.autograd.grad(y, given, grad), theirs, strict=True):
                torch.testing.assert_close(made, other, rtol=1e-3, atol=1e-3, check_dtype=False)
    assert not asked, [(tuple(a[1].shape), a[1].stride()) for a in asked]
