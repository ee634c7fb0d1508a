"""The questions that experiments answer, in the order of the gallery, with the experiments that answer each."""

QUESTIONS = {
    "How noisy is a gradient through chaos, and is it right?": (
        "chaos",
        "bifurcation",
        "total_propagation",
        "lorenz_control",
        "contact",
        "second_derivatives",
    ),
    "Does a gradient through chaos teach a policy?": (
        "policy_search",
        "policy_search_clipped",
        "policy_search_cartpole",
    ),
    "Does Gaussian shaping help?": ("gaussian_shaping", "gaussian_shaping_swarm"),
    "Which estimator for discrete choices?": (
        "benchmarks.choice_peers",
        "benchmarks.discrete_choices",
        "benchmarks.peers",
        "discrete_vae",
    ),
    "How much may a gradient forget?": ("rad_table1", "rad_noise", "rad_training", "rad_pde", "rad_paths"),
    "Can messages that are no gradients teach a network?": (
        "mplp_published",
        "mplp_from_random",
        "mplp_sinusoid",
        "mplp_maml",
        "mplp_mnist",
    ),
    "What do learned messages learn?": ("mplp_sgd", "mplp_dynamics", "mplp_batch_entropy"),
    "Which outer gradient trains a rule?": ("outer_gradients", "outer_training"),
    "Which component taught a weight?": ("tracing_ablation", "tracing_scaling"),
    "Are there other ways back?": ("ways_back", "predictive_coding"),
    "What does it cost?": (
        "benchmarks.estimators",
        "benchmarks.randomized",
        "benchmarks.tracing",
        "benchmarks.mplp",
        "collectives",
    ),
}
