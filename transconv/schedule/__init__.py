"""How a computation becomes a kernel: one line of blocks and words, and when it is legal.

In: a computation, a target, a schedule. Out: None, or why not in a sentence. Knows: compute, target.
"""

from transconv.schedule.counts import (
    QUAD,
    ROWS,
    WARP_GROUP,
    ahead,
    ahead_bytes,
    by_tile,
    chain,
    has_quads,
    k_steps,
    lanes,
    moves_sums,
    needed,
    product_columns,
    programs,
    sides,
    tile,
    tiles_along,
)
from transconv.schedule.legality import most_sums, of_any_size, why_not
from transconv.schedule.schedule import Block, Schedule
from transconv.schedule.schedule import register as register_word
from transconv.schedule.schedule import unregister as unregister_word
from transconv.schedule.tiles.box_dimensions import ENGINE_ALIGN, INTEGERS, ROW, fewest_positions
from transconv.schedule.tiles.boxes import Box, box_of, pile
from transconv.schedule.tiles.copy_kernels import Scheduled, is_copy, rounds, share
from transconv.schedule.tiles.merging import inner_feature
from transconv.schedule.tiles.packing import (
    FEATURES,
    diagonal,
    innermost,
    reads_along,
    row_of,
    rows_of_features,
    wants_rounding,
    why_not_copied,
    why_not_rows,
)
from transconv.schedule.tiles.partial_results import (
    PROGRAM,
    carried,
    divided,
    finishes,
    groups,
    kept,
    left_bytes,
    part_spaces,
    parts_of,
    reduced_sides,
    told,
    within,
    within_places,
)
from transconv.schedule.tiles.shared_memory import (
    behind_bytes,
    boxes_behind,
    in_place,
    result_boxes,
    result_bytes,
    shared_bytes,
    tiles_of_a_stage,
    told_behind,
    transposed_bytes,
    why_not_behind,
)
from transconv.schedule.word_rules import LONGEST, MOST_WRITTEN, why_not_early
from transconv.schedule.words import (
    PRICED,
    PROPOSING,
    WORDS,
    Such,
    Word,
    in_registers,
    with_letter,
    without,
    words,
)
from transconv.schedule.words import registered as registered_words
from transconv.schedule.words import table as words_table

__all__ = ["ENGINE_ALIGN", "FEATURES", "INTEGERS", "LONGEST", "MOST_WRITTEN", "PRICED", "PROGRAM",
           "PROPOSING", "QUAD", "ROW", "ROWS", "WARP_GROUP", "WORDS", "Block", "Box", "Schedule",
           "Scheduled", "Such", "Word", "ahead", "ahead_bytes", "behind_bytes", "box_of", "boxes_behind",
           "by_tile", "carried", "chain", "diagonal", "divided", "fewest_positions", "finishes", "groups",
           "has_quads", "in_place", "in_registers", "inner_feature", "innermost", "is_copy", "k_steps",
           "kept", "lanes", "left_bytes", "most_sums", "moves_sums", "needed", "of_any_size",
           "part_spaces", "parts_of", "pile", "product_columns", "programs", "reads_along",
           "reduced_sides", "register_word", "registered_words", "result_boxes", "result_bytes", "rounds",
           "row_of", "rows_of_features", "share", "shared_bytes", "sides", "tile", "tiles_along",
           "tiles_of_a_stage", "told", "told_behind", "transposed_bytes", "unregister_word",
           "wants_rounding", "why_not", "why_not_behind", "why_not_copied", "why_not_early",
           "why_not_rows", "with_letter", "within", "within_places", "without", "words", "words_table"]
