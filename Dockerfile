# An image for `asyncpar k8s --image`, and for a service that embeds a node: the wheel of this checkout, and no compiler.
#   docker build -t asyncpar .
#   docker build -t asyncpar --build-arg EXTRAS=checkpoint,metrics .
FROM python:3.13-slim-trixie AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY asyncpar asyncpar
ARG EXTRAS=""
RUN python -m venv /opt/asyncpar \
    && /opt/asyncpar/bin/pip install --no-cache-dir --disable-pip-version-check ".${EXTRAS:+[$EXTRAS]}"

FROM python:3.13-slim-trixie
COPY --from=build /opt/asyncpar /opt/asyncpar
ENV PATH=/opt/asyncpar/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 asyncpar
USER 1000:1000
WORKDIR /home/asyncpar
ENTRYPOINT ["asyncpar"]
CMD ["--help"]
