"""Devices for the commands that run gradients."""


def start_jax(devices: int, x64: bool) -> None:
    """Starts JAX on so many faked CPU devices, unless it runs on as many already.

    Raises:
        ValueError: JAX has started with fewer.
    """
    import jax  # here: a command that takes no devices never pays for it

    from jax_ddp_weighting.distributed.mesh import force_cpu_devices

    try:
        force_cpu_devices(devices)
    except RuntimeError as error:  # whoever runs a command from Python may have more of them
        if len(jax.devices()) < devices:
            raise ValueError(str(error)) from None
    if x64:
        jax.config.update("jax_enable_x64", True)
