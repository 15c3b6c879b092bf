class dist:
    """torch.distributed in a world of eight."""

    get_world_size = staticmethod(lambda: 8)
    new_group = staticmethod(tuple)


pass  # the snippet
assert list(groups.items()) == [
    *((block, block) for block in ((0, 1), (2, 3), (4, 5), (6, 7))),
    *((block, block) for block in ((0, 1, 2, 3), (4, 5, 6, 7))),
    *((block, block) for block in ((0, 1, 2, 3, 4, 5, 6, 7),)),
]
