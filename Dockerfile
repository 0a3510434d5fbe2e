# syntax=docker/dockerfile:1
# docker build -t gsm8k-rlhf .        docker run --rm -v gsm8k-rlhf:/home/rlhf/project gsm8k-rlhf
# Arguments after the image's name are choices, as of `make run`: scale=smoke reward=mixture ppo.kl.coef=0.02

# The environment, exactly as requirements.lock has it; uv comes from the lock as well.
FROM python:3.11-slim AS environment
WORKDIR /home/rlhf/project
COPY requirements.lock .
RUN python -m venv .venv \
    && sed -n '/^uv==/,/[^\\]$/p' requirements.lock > .venv/uv.txt \
    && .venv/bin/python -m pip install --quiet --no-cache-dir --require-hashes --no-deps -r .venv/uv.txt \
    && .venv/bin/uv pip sync --no-cache --python .venv/bin/python --require-hashes requirements.lock

FROM python:3.11-slim
# DVC asks git for the repository's root.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home rlhf
USER rlhf
WORKDIR /home/rlhf/project
COPY --from=environment --chown=rlhf /home/rlhf/project/.venv .venv
COPY --chown=rlhf . .
# Results, runs and the registry live in the project's directory: keep it in a volume.
RUN git init --quiet
ENV PATH=/home/rlhf/project/.venv/bin:$PATH DO_NOT_TRACK=true PYTHONUNBUFFERED=1
ENTRYPOINT ["python", "-m", "flows.pipeline"]
