# Penstock in an image: `docker build -t penstock .`
FROM python:3.13-slim AS build
WORKDIR /build
COPY requirements.lock pyproject.toml README.md ./
RUN python -m venv tools \
 && sed -n '/^uv==/,/# via/p' requirements.lock > uv.lock \
 && tools/bin/pip install --no-cache-dir --require-hashes -r uv.lock
# What pyproject.toml asks for, in the versions and with the hashes of the lock; nothing for development.
RUN python -m venv --without-pip /opt/penstock \
 && tools/bin/uv pip install --no-cache --python /opt/penstock/bin/python --compile-bytecode \
      --require-hashes --constraint requirements.lock -r pyproject.toml
COPY src src
RUN tools/bin/uv build --no-cache --wheel --require-hashes --build-constraint requirements.lock \
 && tools/bin/uv pip install --no-cache --python /opt/penstock/bin/python --compile-bytecode --no-deps \
      dist/*.whl
# The cache of Spark's classes fits JARs of these times alone; layers keep whole seconds.
RUN find /opt/penstock -name '*.jar' -exec touch -d '2026-01-01 00:00:00 UTC' '{}' +

FROM python:3.13-slim
RUN useradd --uid 10001 --user-group --home-dir /var/lib/penstock --create-home penstock
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/var/cache
# Each start takes half the time.
RUN penstock warm
USER penstock
WORKDIR /var/lib/penstock
VOLUME /var/lib/penstock
EXPOSE 7380
# 503 where the process can't go on without a restart; what it waits for shows in /readyz.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:7380/healthz', timeout=4)"]
ENTRYPOINT ["penstock"]
CMD ["run", "-c", "/etc/penstock/penstock.yaml", "--listen", "0.0.0.0:7380"]
