"""Partition of a flat vector among the members of a roster."""


def part_sizes(num_elements: int, num_parts: int) -> list[int]:
    """Return the sizes of contiguous parts, in elements. They differ by at most 1, longer first.

    Args:
        num_elements: Length of the vector, at least 0.
        num_parts: At least 1. With more parts than elements, the last ones are empty.
    """
    assert num_elements >= 0, num_elements
    assert num_parts >= 1, num_parts
    size, num_longer = divmod(num_elements, num_parts)
    sizes = [size + (index < num_longer) for index in range(num_parts)]
    assert sum(sizes) == num_elements, "every element is in one part"
    return sizes
