"""Primitives by what they do. Any other counts as nonlinear, as differentiable and as no move of elements."""

from collections.abc import Collection


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Each output is the input with the same number.
IDENTITY = _names("copy device_put layout_constraint name optimization_barrier pvary sharding_constraint tap")

# Like `IDENTITY` in value; a derivative, a message or `jax.vmap` may be refused, or what `jax.vmap` maps is changed.
SAME_VALUE = IDENTITY | _names(
    "mapped_with mark refuse_batching refuse_derivative refuse_message refuse_second_derivative"
)

# One output, linear in the first input, that holds all elements of that input (for conversions see `memory`).
VIEW = _names(
    """broadcast_in_dim convert_element_type copy expand_dims layout_constraint reshape rev sharding_constraint squeeze
    transpose"""
)

# One output, each element of which is a function of the elements at the same place of the inputs.
ELEMENTWISE = _names(
    """abs acos acosh add add_any asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt clamp convert_element_type cos
    cosh digamma div erf erf_inv erfc exp exp2 expm1 igamma igamma_grad_a igammac integer_pow lgamma log log1p log2
    logistic max min mul neg nextafter one_minus_square polygamma polynomial pow random_gamma refuse_derivative
    refuse_second_derivative regularized_incomplete_beta rem rsqrt sin sinh sqrt square sub tan tanh zero_with_gradient
    zeta"""
)

# Outputs that do not depend on the inputs as far as derivatives go.
NO_DERIVATIVE = _names(
    """and any_mapped argmax argmin bitcast_convert_type ceil clz eq eq_to floor ge gt iota is_finite le le_to lt lt_to
    ne not or population_count random_bits round shift_left shift_right_arithmetic shift_right_logical sign
    stop_gradient xor"""
)

# What a function is made of that acts element by element: elementwise primitives, and those that give scalars a shape.
WITHIN_ELEMENTWISE = ELEMENTWISE | NO_DERIVATIVE | IDENTITY
WITHIN_ELEMENTWISE |= _names("broadcast_in_dim mapped_with reshape select_n squeeze")

# Sums of products of the elements of two operands.
PRODUCT = _names("conv_general_dilated dot_general")

# Linear in each operand while the others are constant.
LINEAR_IN_EACH = PRODUCT | {"mul", "ragged_dot_general"}

# Linear in all operands together; `select_n` in all but the first one, which chooses.
LINEAR_IN_ALL = (
    IDENTITY
    | VIEW
    | _names(
        """add add_any complex concatenate conj cumsum fft imag neg pad real reduce_precision reduce_sum
        reduce_window_sum refuse_derivative refuse_second_derivative select_n slice split stack sub tile unstack"""
    )
)

# Linear in the operands with these numbers together.
LINEAR_IN: dict[str, tuple[int, ...]] = dict.fromkeys(_names("scatter scatter-add scatter-sub"), (0, 2))
LINEAR_IN |= {"dynamic_update_slice": (0, 1), "triangular_solve": (1,), "tridiagonal_solve": (3,)}
LINEAR_IN |= dict.fromkeys(
    _names("div dynamic_slice gather mapped_with scatter-mul select_and_scatter_add tap_message"), (0,)
)


# Whether a primitive is linear in the operands with these numbers together, while the others are constant.
def is_linear_in(name: str, numbers: Collection[int]) -> bool:
    if name in LINEAR_IN_ALL:
        return name != "select_n" or 0 not in numbers
    return (name in LINEAR_IN_EACH and len(numbers) == 1) or set(numbers) <= set(LINEAR_IN.get(name, ()))


# Elementwise, and linear in messages.
LINEAR_ELEMENTWISE = _names("add add_any convert_element_type copy div mul neg select_n sub")

# So cheap that the output is computed again rather than remembered.
CHEAP_TO_REPEAT = VIEW | _names(
    """abs add add_any and bitcast_convert_type clamp concatenate div eq exp ge gt integer_pow iota is_finite le log
    logistic lt max min mul ne neg not or pad random_bits random_fold_in random_seed random_split random_unwrap
    random_wrap rsqrt select_n shift_left shift_right_logical sign slice sqrt square sub tanh threefry2x32 xor"""
)

# Their inner programs say how two elements are combined, and have no sites.
COMBINE = _names(
    """reduce reduce_window scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub select_and_scatter"""
)

# These have programs inside, and yet are treated as a single function of the inputs, like primitives without programs.
ONE_FUNCTION = COMBINE | {"custom_linear_solve"}
