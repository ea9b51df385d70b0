# An image that serves: docker build -t lockstep . && docker run --rm -p 127.0.0.1:30000:30000 lockstep
# Another model: docker run ... -v /models:/models lockstep serve --model /models/NAME
FROM python:3.11-slim

# The default build of torch brings CUDA. For an index that has builds for CPUs: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
# Extras of pyproject.toml: --build-arg EXTRAS=openvino, or EXTRAS=openvino,ray
ARG EXTRAS

# What is needed is a layer of its own: a change of the sources does not install torch again.
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN python -c "import os, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
    extras = ['serve', *filter(None, os.environ.get('EXTRAS', '').split(','))]; \
    needed = project['dependencies'] + sum([project['optional-dependencies'][extra] for extra in extras], []); \
    print(*[text for text in needed if not text.startswith('lockstep-engine')], sep=chr(10))" > requirements.txt \
    && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt

COPY README.md LICENSE ./
COPY engine ./engine
COPY lockstep ./lockstep
COPY scripted ./scripted
RUN pip install --no-cache-dir --no-deps .

# Recordings and traces go to /srv, unless a flag says otherwise; converted models to the user's home.
RUN useradd --create-home engine && chown engine /srv
USER engine
WORKDIR /srv

# Inside a container loopback is the container's own. Clients from outside need no key unless ENGINE_API_KEY is set;
# the operators' routes stay closed unless ENGINE_ADMIN_KEY is. Another port is ENGINE_PORT: the health check asks there.
ENV ENGINE_HOST=0.0.0.0 ENGINE_PORT=30000
EXPOSE 30000

HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["python", "-c", \
    "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"ENGINE_PORT\"]}/health', timeout=4)"]

# SIGTERM, which docker stop sends, drains: --stop-timeout must leave time for it (drain_timeout_s).
ENTRYPOINT ["engine"]
CMD ["serve"]
