"""One device, no network, no roles: model, kernels, paged cache, step core, sampler, scheduling primitives."""
