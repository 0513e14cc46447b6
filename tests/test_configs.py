"""The configurations: completeness, recipes, arguments, errors."""

import importlib
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from configs import (
    baselines,
    demo,
    performer_pixels16,
    points,
    rpe_vit,
    translution_gpt,
    translution_vit,
    volumes_vit,
)
from relattn.data import IMAGE_OPTIONS
from relattn.models import SIZES, build_model, complete_options
from relattn.models.cnn import PUBLISHED_BASELINES
from relattn.nn.registry import ATTENTIONS, POSITIONS
from relattn.training import check_config
from relattn.training.config_file import read_config
from studies.sizes import count_parameters

DATASETS = ["mnist", "fashion_mnist", "cifar10"]
VARIANTS = ["none", "learnable_sincos", "constrained_sincos", "banded"]
PAIRS = [",".join(pair) for pair in itertools.product(DATASETS, VARIANTS)]
CONFIGS = [
    ("performer", pair) for pair in ["", "cpu", "smoke", "smoke,published", *PAIRS]
]
CONFIGS += [
    ("baselines", argument)
    for argument in [
        "",
        "smoke",
        "cpu",
        "resnet18,cifar10",
        "vgg16,fashion_mnist,cpu",
        "linformer,cpu",
        "linformer,cpu,published",
        "routing,smoke",
    ]
]
CONFIGS += [("demo", variant) for variant in demo.VARIANTS]
CONFIGS += [("performer_pixels16", v) for v in performer_pixels16.VARIANTS]
CONFIGS += [("performer_pixels16", "cosine,redraw=20,torus")]
CONFIGS += [
    ("translution_vit", argument)
    for argument in [
        "",
        "smoke",
        "imagenet,smoke",
        "imagenet,C/16",
        "cpu,dynamic",
        *translution_vit.METHODS,
    ]
]
CONFIGS += [
    ("translution_gpt", argument)
    for argument in [
        "",
        "smoke",
        "openwebtext,B-512",
        "cpu",
        "llama,smoke",
        "rope,llama,num_kv_heads=1,window=64",
        *translution_gpt.METHODS,
    ]
]
RPE_VIT = ["", "smoke", "cpu", "cifar10", "cifar10,cpu", "relu,string_gate", "softmax"]
CONFIGS += [("rpe_vit", argument) for argument in RPE_VIT]
CONFIGS += [("volumes_vit", a) for a in ["", "smoke", *volumes_vit.METHODS]]
CONFIGS += [("points", a) for a in ["", "smoke", *points.ATTENTIONS]]


def get_config(name, argument):
    return importlib.import_module(f"configs.{name}").get_config(argument)


@pytest.mark.parametrize(("name", "argument"), CONFIGS)
def test_config_is_locked_and_complete(name, argument):
    config = get_config(name, argument)
    check_config(config)
    for part in (config, config.model, config.data, config.optimizer):
        assert part.is_locked
    with pytest.raises(AttributeError, match="learning_rates"):
        config.optimizer.learning_rates = 1.0


@pytest.mark.parametrize("name", ["translution_vit", "translution_gpt", "rpe_vit"])
def test_the_recipes_decay_all_parameters(name):
    optimizer = get_config(name, "").optimizer
    assert (optimizer.weight_decay, optimizer.decay_mask) == (0.05, "all")


# What the arguments of a configuration select. Sizes are given together.
SELECTED = {"name", "attention", "position", "patch_size", *SIZES["A"]}
SELECTED |= {"num_relative_layers", "attention_dropout", "dropout"}


@pytest.mark.parametrize(("name", "argument"), CONFIGS)
def test_config_lists_only_what_it_changes_of_the_model(name, argument):
    model = get_config(name, argument).model
    defaults = complete_options({"name": model.name})
    repeated = {key for key, value in model.items() if value == defaults[key]}
    assert repeated <= SELECTED, f"configs/{name}.py repeats the defaults of {repeated}"
    path = f"{name}:{argument}" if argument else name
    assert read_config(path).model.to_dict() == defaults | model.to_dict()


IMAGE_CONFIGS = [
    pair for pair in CONFIGS if pair[0] not in ("translution_gpt", "points")
]
PAGE = pathlib.Path(__file__).parents[1] / "docs" / "data.md"
# Those of text, in docs/data.md.
TEXT_KEYS = {"context_length", "tokenizer"}


@pytest.mark.parametrize(("name", "argument"), IMAGE_CONFIGS)
def test_every_image_configuration_has_every_option_of_the_page(name, argument):
    options = {
        "augment": "rotate(degrees=7)",
        "mix": "mixup(alpha=0.3)",
        "erase": "random_erasing(probability=0.3)",
        "placement": "dynamic",
        "canvas": 97,
        "background": "black",
        "skip_unreadable": True,
        "num_workers": 3,
        "short_side": 300,
        "image_size": 280,
        "standardize": True,
        "split_seed": 5,
        "num_validation": 7,
        "source": "folder",
        "name": "mine",
        "data_dir": "DIR",
        "manual_dir": "ARCHIVES",
    }
    found = re.findall(r"config\.data\.(\w+)", PAGE.read_text())
    assert {*found} - TEXT_KEYS <= {*options}
    assert {*options} == {"name", "image_size", *IMAGE_OPTIONS}
    path = f"{name}:{argument}" if argument else name
    given = [f"--config.data.{key}={value}" for key, value in options.items()]
    assert read_config(path, given).data.to_dict() == options


@pytest.mark.quick("performer-none")
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["performer", "demo"])
def test_config_builds_its_model(name, variant):
    config = get_config(name, variant)
    model = build_model(config.model.to_dict(), num_classes=10, image_shape=(32, 32, 1))
    logits, _ = jax.eval_shape(
        model.init_with_output, jax.random.key(0), jnp.zeros((1, 32, 32, 1))
    )
    assert logits.shape == (1, 10)


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_published_performers_have_the_authors_recipe(variant, dataset):
    config = get_config("performer", f"{variant},{dataset},published")
    expected = get_config("performer", f"{variant},{dataset}")
    with expected.unlocked():
        expected.optimizer.learning_rate = 5e-5
        expected.model.attention = "favor(eps=0.3, sign_corrected=False)"
        if variant == "banded":
            clip, expected.batch_size = (4, 11) if dataset == DATASETS[1] else (6, 6)
            options = (
                "cls='corner', separate_projections=True, eps=0.3, sign_corrected=False"
            )
            expected.model.update(
                attention=f"banded(clip={clip}, {options})",
                dropout=0.0,
                attention_dropout=0.0,
            )
    assert config.to_dict() == expected.to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_published_performers_have_the_published_parameter_count(variant):
    counts = []
    for arguments in (variant, f"{variant},published"):
        config = get_config("performer", arguments)
        shape = (32, 32, 1)
        model = build_model(config.model, num_classes=10, image_shape=shape)
        counts.append(count_parameters(model, shape))
    # tests/studies/test_sizes.py compares the first with the published counts.
    assert counts[0] == counts[1]


def test_clip_is_an_argument():
    config = get_config("performer", "banded,clip=2")
    assert (config.model.attention, config.batch_size) == ("banded(clip=2)", 22)
    config = get_config("performer", "published,banded,clip=2,cifar10")
    assert "clip=2" in config.model.attention and config.batch_size == 22


def test_redraws_and_scales_are_arguments():
    config = get_config("performer", "published,redraw=100,scales=16,fashion_mnist")
    assert config.redraw_every == 100
    assert config.model.position == "constrained_sincos(num_scales=16)"
    default = get_config("performer", "published,fashion_mnist")
    with default.unlocked():
        default.redraw_every = 100
        default.model.position = config.model.position
    assert config.to_dict() == default.to_dict()
    assert get_config("performer", "none,smoke").redraw_every == 0
    assert get_config("performer", "none,smoke,redraw=9").redraw_every == 9


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet18", "linformer"])
def test_published_baselines_have_the_notebooks_recipe(name):
    config = get_config("baselines", f"{name},cifar10,published")
    check_config(config)
    build_model(config.model, num_classes=10, image_shape=(32, 32, 3))
    options = {key: config.model[key] for key in PUBLISHED_BASELINES[name]}
    assert options == PUBLISHED_BASELINES[name]
    optimizer = config.optimizer
    assert (optimizer.name, optimizer.b1, optimizer.b2) == ("adam", 0.9, 0.999)
    assert (config.num_epochs, config.early_stopping_epochs) == (20, 0)
    assert optimizer.clip_norm == 0
    linformer = (3e-5, 64, "exponential", 0.7)
    assert (
        optimizer.learning_rate,
        config.batch_size,
        config.schedule.name,
        config.schedule.decay_rate,
    ) == (linformer if name == "linformer" else (2e-4, 32, "constant", 1.0))
    assert config.data == get_config("baselines", f"{name},cifar10").data


def test_modern_is_the_default_and_the_only_form_of_routing():
    for name in baselines.MODELS:
        modern = get_config("baselines", f"{name},modern").to_dict()
        assert modern == get_config("baselines", name).to_dict()
        published = get_config("baselines", f"{name},published").to_dict()
        assert (published == modern) == (name == "routing")


@pytest.mark.parametrize("name", baselines.MODELS)
def test_baselines_build_and_have_the_performers_recipe(name):
    for cut in ("", ",cpu"):
        config = get_config("baselines", f"{name},cifar10{cut}")
        performer = get_config("performer", f"none,cifar10{cut}")
        assert config.model.name == name
        build_model(config.model, num_classes=10, image_shape=(32, 32, 3))
        with performer.unlocked():
            performer.model = config.model
            performer.redraw_every = 0
        assert config.to_dict() == performer.to_dict()


def test_cpu_recipe_uses_patches_instead_of_pixels():
    config = get_config("performer", "cpu,banded,fashion_mnist")
    assert (config.data.name, config.data.source) == ("fashion_mnist", "embedded")
    assert (config.model.patch_size, config.num_steps, config.batch_size) == (
        4,
        200,
        32,
    )
    full = get_config("performer", "banded,fashion_mnist")
    assert config.optimizer == full.optimizer
    assert config.model.to_dict() == {**full.model, "patch_size": 4}


@pytest.mark.quick("self_attention", "no_position", "relative_key")
@pytest.mark.parametrize("method", translution_vit.METHODS)
def test_every_method_builds_for_images_and_text(method):
    config = get_config("translution_vit", f"{method},A/56,layers=2")
    model = build_model(config.model, num_classes=10, image_shape=(112, 112, 1))
    assert (model.num_layers, model.num_relative_layers) == (6, 2)
    config = get_config("translution_gpt", f"{method},A-5")
    assert config.data.context_length == 5
    model = build_model(config.model, vocab_size=11, context_length=5)
    assert model.context_length == 5


def test_llama_has_the_size_of_the_recipe():
    def parameters(arguments):
        config = get_config("translution_gpt", arguments)
        return build_model(config.model, vocab_size=11, context_length=5)

    llama, plain = parameters("rope,llama,A-5"), parameters("rope,A-5")
    assert (llama.mlp_dim, plain.mlp_dim) == (512, 768)
    assert (llama.norm_type, llama.activation) == ("rms_norm", "swiglu")
    # Without biases of dim 192: 192 of attention, 768 + 192 of the MLP, and those of
    # norms, 2 in each layer, the last one, and the second last one with its scale.
    lost = 6 * (192 + 768 + 192 + 2 * 192) + 192 + 2 * 192
    assert count_parameters(plain) - count_parameters(llama) == lost
    shared = parameters("rope,llama,num_kv_heads=1,window=64,A-5")
    assert shared.attention == "softmax(window=64)"
    # Keys and values of one head of three.
    lost = 6 * 2 * 192 * 128
    assert count_parameters(llama) - count_parameters(shared) == lost


def test_ablations_are_arguments():
    def attention(arguments, name="translution_vit"):
        return get_config(name, arguments).model.attention

    assert attention("rank=16,base=False") == "lor_translution(rank=16, base=False)"
    assert attention("translution,relative=qk") == "translution(relative='qk')"
    assert attention("translution,absolute=True") == "translution(absolute=True)"
    averaged = attention("average=True", "translution_gpt")
    assert averaged == "lor_translution(rank=8, average=True)"
    config = get_config("translution_vit", "rope,imagenet,A/56")
    assert config.model.position == "rope2d(base=10000.0)"
    assert config.data.mix == "cutmix(alpha=1.0) | mixup(alpha=0.8)"
    config = get_config("translution_vit", "translution,position=learned,dynamic,A/7")
    assert config.model.position == "learned"
    assert (config.data.placement, config.model.patch_size) == ("dynamic", 7)


@pytest.mark.parametrize(
    "name",
    [
        "performer",
        "baselines",
        "demo",
        "translution_vit",
        "translution_gpt",
        "rpe_vit",
        "volumes_vit",
        "points",
    ],
)
def test_config_docstring_has_the_launch_command(name):
    command = f"python train.py --config=configs/{name}.py:"
    assert command in importlib.import_module(f"configs.{name}").__doc__


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("performer", "fashion_mnits,none", "'fashion_mnits': did you mean 'fashion_m"),
        ("performer", "mnist,banned", "no argument 'banned': did you mean 'banded'"),
        ("performer", "banded,clip=5", "has clip=2, 4, 6, got 5"),
        ("performer", "none,clip=2", "has clip=... for 'banded' only, got 'none'"),
        ("performer", "none,scales=4", "has scales=... for 'constrained_sincos' only"),
        ("performer", "redraws=3", "no option 'redraws': did you mean 'redraw'"),
        ("performer", "mnist,publish", "'publish': did you mean 'published'"),
        ("baselines", "resnet", "no argument 'resnet': did you mean 'resnet18'"),
        ("demo", "nnone", "no argument 'nnone': did you mean 'none'"),
        ("translution_vit", "translutoin", "'translutoin': did you mean 'translution'"),
        ("translution_vit", "D/12", "no argument 'D/12': did you mean"),
        ("translution_vit", "ranks=3", "no option 'ranks': did you mean 'rank'"),
        ("translution_vit", "layers=qk", "needs layers=int, got 'qk'"),
        ("translution_gpt", "A/160", "no argument 'A/160': did you mean 'A-160'"),
        ("translution_gpt", "absolute=True", "no option 'absolute'"),
        ("rpe_vit", "mnist,rope", "no argument 'rope': did you mean 'rope2d'"),
    ],
)
def test_unknown_argument_raises_with_the_closest(name, argument, message):
    with pytest.raises(ValueError, match=message):
        get_config(name, argument)


def test_arguments_select_the_recipe():
    config = get_config("performer", "cifar10,banded")
    assert (config.data.name, config.data.standardize) == ("cifar10", True)
    assert config.model.attention == "banded(clip=6)"
    assert get_config("performer", "banded,cifar10").to_dict() == config.to_dict()
    assert not get_config("performer", "mnist,none").data.standardize
    assert get_config("performer", "fashion_mnist,smoke").data.source == "embedded"


@pytest.mark.parametrize("attention", sorted({*rpe_vit.ATTENTIONS} & {*ATTENTIONS}))
@pytest.mark.parametrize("position", sorted({*rpe_vit.POSITIONS} & {*POSITIONS}))
def test_guoji_models_build(attention, position):
    config = get_config("rpe_vit", f"cifar10,{attention},{position},smoke")
    data = config.data
    assert (data.name, data.source, data.split_seed) == ("mnist", "embedded", 42)
    build_model(config.model, num_classes=10, image_shape=(28, 28, 1))


def test_guoji_recipe_has_the_published_epochs_and_steps():
    steps = {}
    for data, num_train in (("mnist", 55_000), ("cifar10", 45_000)):
        config = get_config("rpe_vit", data)
        assert config.data.num_validation == 5000 and config.data.standardize
        steps[data] = config.num_epochs * (num_train // config.batch_size)
    # The paper counts steps from 0: 8,579 and 35,099.
    assert steps == {"mnist": 8_580, "cifar10": 35_100}
    assert get_config("rpe_vit", "cifar10").data.augment == "flip_crop(padding=4)"
    cut = get_config("rpe_vit", "cpu,relu")
    assert cut.model == get_config("rpe_vit", "relu").model
