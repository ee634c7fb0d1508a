"""Meta-training: tasks, inner learners, unrolls, outer gradients, and the loop that trains meta-parameters."""

from apgrad.meta import data as data
from apgrad.meta._checkpoints import Checkpoints as Checkpoints
from apgrad.meta._evolution import (
    evolution as evolution,
    persistent_evolution as persistent_evolution,
    single_evolution as single_evolution,
    truncated_evolution as truncated_evolution,
)
from apgrad.meta._learners import Learner as Learner, message_passing as message_passing, optimizer as optimizer
from apgrad.meta._log import tensorboard as tensorboard
from apgrad.meta._outer import (
    OuterGradient as OuterGradient,
    average as average,
    batched as batched,
    clipped as clipped,
    forward_mode as forward_mode,
    reverse_mode as reverse_mode,
    truncated as truncated,
)
from apgrad.meta._partition import merge as merge, partition as partition
from apgrad.meta._perturbed import perturbed as perturbed
from apgrad.meta._tasks import (
    Task as Task,
    accuracy as accuracy,
    images as images,
    mlp as mlp,
    pool as pool,
    sinusoid as sinusoid,
)
from apgrad.meta._training import (
    Training as Training,
    begin as begin,
    normalize_tensors as normalize_tensors,
    outer_steps as outer_steps,
    train as train,
)
from apgrad.meta._unroll import (
    Evaluation as Evaluation,
    Inner as Inner,
    Problem as Problem,
    WithPrior as WithPrior,
    batch_entropy as batch_entropy,
    entropy_penalty as entropy_penalty,
    evaluate as evaluate,
    inner_problem as inner_problem,
    objective as objective,
    run as run,
)
