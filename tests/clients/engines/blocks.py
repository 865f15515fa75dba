# SPDX-License-Identifier: Apache-2.0
"""What blocks hold, and whether what was loaded is that."""
from data import blob


def check(number, size, loaded):
    """True, or an error that says how LOADED differs from block NUMBER."""
    loaded, right = bytes(loaded), blob(number, size)
    if loaded == right:
        return True
    at = next((i for i, (a, b) in enumerate(zip(loaded, right)) if a != b), len(loaded))
    rest = "zeros" if not any(loaded[at:]) else "other bytes"
    raise AssertionError(f"block {number} is wrong: {rest} from byte {at} on of {size}, "
                         f"{len(loaded)} loaded")
