"""Object stores on loopback, for tests: a strict server of the GCS JSON API, and moto's server of S3.

`gcp-storage-emulator` ignores `ifGenerationMatch` and lists without pages, so a test with it proves little. This
server keeps to the service: conditions, generations, pages of a few names, ranges, multipart and resumable uploads.
moto's server checks `If-Match` and `If-None-Match` one step before it writes; `Recorder` has one write at a time, as
the service has. Both servers record requests, may refuse or slow some, and hold nothing but memory.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import io
import json
import re
import sys
import threading
import traceback
import urllib.parse
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import google_crc32c

PAGE = 7  # names in a page of a list


class Request(NamedTuple):
  """What a server was asked.

  Attributes:
    method: the HTTP method.
    path: the decoded path.
    query: its parameters.
    headers: its headers, in lower case.
  """

  method: str
  path: str
  query: dict[str, str]
  headers: dict[str, str]


class Answer(NamedTuple):
  """What a server answers."""

  status: int
  body: bytes = b''
  headers: dict[str, str] = {}  # noqa: RUF012


class Blob(NamedTuple):
  """One object of a bucket."""

  content: bytes
  generation: int


Interceptor = Callable[[Request], Answer | None]


class GcsServer:
  """The GCS JSON API, as far as TensorStore and gcsfs use it.

  Attributes:
    buckets: the objects of each bucket.
    bucket: URL of the latest bucket.
    requests: all requests so far.
    intercept: called with each request; an answer of it replaces the server's own.
  """

  def __init__(self) -> None:
    self.buckets: dict[str, dict[str, Blob]] = {}
    self.requests: list[Request] = []
    self.intercept: Interceptor = lambda request: None
    self._uploads: dict[str, tuple[str, dict[str, str], bytearray]] = {}
    self._generation = 1000
    self._lock = threading.Lock()
    self._http = QuietServer(('127.0.0.1', 0), self._handler())
    threading.Thread(target=self._http.serve_forever, daemon=True).start()
    self.url = f'http://127.0.0.1:{self._http.server_port}'

  def close(self) -> None:
    self._http.shutdown()
    self._http.server_close()

  def with_bucket(self, name: str) -> GcsServer:
    """The same server with nothing recorded, and an empty bucket more."""
    self.buckets[name], self.bucket = {}, f'gs://{name}'
    self.requests.clear()
    self.intercept = lambda request: None
    return self

  def put(self, url: str, content: bytes) -> None:
    """Writes an object, as another process would."""
    bucket, _, name = url.removeprefix('gs://').partition('/')
    with self._lock:
      self._put(bucket, {'name': name}, content)

  def refusal(self, status: int, code: str) -> Answer:
    """An error as this server answers it."""
    return error(status, code)

  def answer(self, request: Request, body: bytes) -> Answer:
    self.requests.append(request)
    intercepted = self.intercept(request)
    if intercepted is not None:
      return intercepted
    with self._lock:
      for pattern, method in self._ROUTES:
        match = re.fullmatch(pattern, f'{request.method} {request.path}', re.DOTALL)
        if match:
          bucket = self.buckets.get(match[1])
          if bucket is None:
            return error(404, 'The specified bucket does not exist.')
          return method(self, match, request, body)
    return error(501, f'not in this server: {request.method} {request.path}')

  def _bucket(self, match, request, body) -> Answer:
    return reply(
      {'kind': 'storage#bucket', 'name': match[1], 'location': 'US', 'locationType': 'region'}
    )

  def _list(self, match, request, body) -> Answer:
    query = request.query
    prefix, delimiter = query.get('prefix', ''), query.get('delimiter')
    entries: dict[str, Any] = {}
    for name in sorted(self.buckets[match[1]], key=str.encode):
      if not name.startswith(prefix) or name < query.get('startOffset', ''):
        continue
      if 'endOffset' in query and name >= query['endOffset']:
        continue
      head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ('', '', '')
      entries[prefix + head + found if found else name] = (
        None if found else self._resource(match[1], name)
      )
    after = base64.urlsafe_b64decode(query.get('pageToken', '')).decode()
    names = [name for name in entries if name > after]
    page = names[: min(PAGE, int(query.get('maxResults', PAGE)))]
    result: dict[str, Any] = {'kind': 'storage#objects'}
    result['items'] = [entries[name] for name in page if entries[name]]
    result['prefixes'] = [name for name in page if not entries[name]]
    if len(page) < len(names):
      result['nextPageToken'] = base64.urlsafe_b64encode(page[-1].encode()).decode()
    return reply({key: value for key, value in result.items() if value})

  def _get(self, match, request, body) -> Answer:
    blob = self.buckets[match[1]].get(match[2])
    failed = self._failed(request.query, blob)
    if blob is None or failed:
      return failed or error(404, f'No such object: {match[1]}/{match[2]}')
    if request.query.get('alt') != 'media':
      return reply(self._resource(match[1], match[2]))
    headers = {'x-goog-generation': str(blob.generation)}
    return ranged(blob.content, request.headers.get('range'), headers)

  def _insert(self, match, request, body) -> Answer:
    kind, query = request.query.get('uploadType'), request.query
    if 'upload_id' in query:
      return self._resume(match, request, body)
    if kind == 'media':
      return self._put(match[1], query, body)
    if kind == 'multipart':
      metadata, content = parts(request.headers['content-type'], body)
      return self._put(match[1], {'name': metadata.get('name', ''), **query}, content)
    if kind == 'resumable':
      name = json.loads(body or b'{}').get('name') or query['name']
      upload = f'upload-{len(self._uploads)}'
      self._uploads[upload] = (match[1], {**query, 'name': name}, bytearray())
      path = urllib.parse.quote(f'/upload/storage/v1/b/{match[1]}/o')
      return Answer(200, b'', {'Location': f'{self.url}{path}?uploadType=resumable&upload_id={upload}'})
    return error(400, f'uploadType {kind}')

  def _resume(self, match, request, body) -> Answer:
    bucket, query, content = self._uploads[request.query['upload_id']]
    content.extend(body)
    total = request.headers.get('content-range', '/').rpartition('/')[2]
    if total == '*' or (total and int(total) > len(content)):
      return Answer(308, b'', {'Range': f'bytes=0-{len(content) - 1}'} if content else {})
    return self._put(bucket, query, bytes(content))

  def _cancel(self, match, request, body) -> Answer:
    self._uploads.pop(request.query['upload_id'], None)
    return error(499, 'Client Closed Request')

  def _put(self, bucket: str, query: dict[str, str], content: bytes) -> Answer:
    name = query['name']
    failed = self._failed(query, self.buckets[bucket].get(name))
    if failed:
      return failed
    self._generation += 1
    self.buckets[bucket][name] = Blob(content, self._generation)
    return reply(self._resource(bucket, name))

  def _delete(self, match, request, body) -> Answer:
    blob = self.buckets[match[1]].get(match[2])
    failed = self._failed(request.query, blob)
    if failed or blob is None:
      return failed or error(404, f'No such object: {match[1]}/{match[2]}')
    del self.buckets[match[1]][match[2]]
    return Answer(204)

  def _rewrite(self, match, request, body) -> Answer:
    source = self.buckets[match[1]].get(match[2])
    if source is None:
      return error(404, f'No such object: {match[1]}/{match[2]}')
    answer = self._put(match[3], {**request.query, 'name': match[4]}, source.content)
    if answer.status != 200:
      return answer
    return reply({'kind': 'storage#rewriteResponse', 'done': True, 'resource': json.loads(answer.body)})

  def _failed(self, query: dict[str, str], blob: Blob | None) -> Answer | None:
    """The answer if a condition of the request does not hold."""
    generation = str(blob.generation if blob else 0)
    if query.get('ifGenerationMatch', generation) != generation:
      return error(412, 'At least one of the pre-conditions you specified did not hold.')
    if blob is not None and query.get('ifGenerationNotMatch') == generation:
      return Answer(304)
    return None

  def _resource(self, bucket: str, name: str) -> dict[str, Any]:
    content, generation = self.buckets[bucket][name]
    return {
      'kind': 'storage#object',
      'id': f'{bucket}/{name}/{generation}',
      'name': name,
      'bucket': bucket,
      'generation': str(generation),
      'metageneration': '1',
      'contentType': 'application/octet-stream',
      'storageClass': 'STANDARD',
      'size': str(len(content)),
      'md5Hash': base64.b64encode(hashlib.md5(content).digest()).decode(),
      'crc32c': base64.b64encode(google_crc32c.value(bytes(content)).to_bytes(4, 'big')).decode(),
      'timeCreated': '2026-01-01T00:00:00.000Z',
      'updated': '2026-01-01T00:00:00.000Z',
    }

  def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
    server = self

    class Handler(WholeHeaders, http.server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'
      disable_nagle_algorithm = True

      def handle_request(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        body = body_of(self.headers, self.rfile)
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        headers = {name.lower(): value for name, value in self.headers.items()}
        if url.path == '/batch/storage/v1':
          answer = batch(server, headers, body)
        else:
          path = urllib.parse.unquote(url.path)
          answer = server.answer(Request(self.command, path, query, headers), body)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
          self.send_header(name, value)
        self.send_header('Content-Length', str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

      do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_request

      def log_message(self, *_: Any) -> None:
        pass

    return Handler

  _ROUTES = (
    (r'GET /storage/v1/b/([^/]+)', _bucket),
    (r'GET /storage/v1/b/([^/]+)/o/?', _list),
    (r'(?:GET) /(?:download/)?storage/v1/b/([^/]+)/o/(.+)', _get),
    (r'POST /upload/storage/v1/b/([^/]+)/o/?', _insert),
    (r'PUT /upload/storage/v1/b/([^/]+)/o/?', _resume),
    (r'DELETE /upload/storage/v1/b/([^/]+)/o/?', _cancel),
    (r'DELETE /storage/v1/b/([^/]+)/o/(.+)', _delete),
    (r'POST /storage/v1/b/([^/]+)/o/(.+)/(?:rewriteTo|copyTo)/b/([^/]+)/o/(.+)', _rewrite),
  )


def turned(text: str) -> str:
  """A text with each quoted MD5 in reverse."""
  return re.sub(r'(?<=["\';])[0-9a-f]{32}(?=["\'&])', lambda match: match[0][::-1], text)


class QuietServer(http.server.ThreadingHTTPServer):
  daemon_threads = True
  request_queue_size = 128

  def handle_error(self, *_: Any) -> None:
    if not isinstance(sys.exception(), ConnectionError):  # clients may leave
      traceback.print_exc()


def reply(content: Any) -> Answer:
  return Answer(200, json.dumps(content).encode(), {'Content-Type': 'application/json; charset=UTF-8'})


def error(status: int, message: str) -> Answer:
  content = {
    'error': {'code': status, 'message': message, 'errors': [{'message': message, 'reason': 'x'}]}
  }
  return Answer(
    status, json.dumps(content).encode(), {'Content-Type': 'application/json; charset=UTF-8'}
  )


def ranged(content: bytes, header: str | None, headers: dict[str, str]) -> Answer:
  """A content, or the part of it that a Range header names."""
  headers = {**headers, 'Content-Type': 'application/octet-stream'}
  match = re.fullmatch(r'bytes=(\d*)-(\d*)', header or '')
  if match is None:
    return Answer(200, content, headers)
  if match[1]:
    start, end = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
  else:
    start, end = max(0, len(content) - int(match[2])), len(content) - 1
  if start >= len(content):
    return Answer(416, b'', {'Content-Range': f'bytes */{len(content)}'})
  return Answer(
    206,
    content[start : end + 1],
    {**headers, 'Content-Range': f'bytes {start}-{end}/{len(content)}'},
  )


def parts(content_type: str, body: bytes) -> tuple[dict[str, Any], bytes]:
  """Metadata and content of a multipart upload."""
  boundary = re.search(r'boundary="?([^";]+)', content_type)
  assert boundary is not None
  _, metadata, content, _ = body.split(b'--' + boundary[1].encode())
  metadata, content = (
    part.partition(b'\n\r\n' if b'\n\r\n' in part else b'\n\n')[2] for part in (metadata, content)
  )
  return json.loads(metadata), content.removesuffix(b'\r\n') if content.endswith(b'\r\n') else content[
    :-1
  ]


def batch(server: GcsServer, headers: dict[str, str], body: bytes) -> Answer:
  """Several requests in one, as gcsfs deletes files."""
  boundary = re.search(r'boundary="?([^";]+)', headers['content-type'])
  assert boundary is not None
  answers = []
  for part in body.split(b'--' + boundary[1].encode())[1:-1]:
    identifier = re.search(rb'Content-ID: *<?([^>\r\n]+)', part)
    line = re.search(rb'^(\w+) (\S+) HTTP', part, re.MULTILINE)
    assert line is not None and identifier is not None
    path = urllib.parse.unquote(urllib.parse.urlsplit(line[2].decode()).path)
    answer = server.answer(Request(line[1].decode(), path, {}, headers), b'')
    answers.append(
      b'--b\r\nContent-Type: application/http\r\nContent-ID: <response-%s>\r\n\r\nHTTP/1.1 %d X\r\n\r\n%s\r\n'
      % (identifier[1], answer.status, answer.body)
    )
  return Answer(200, b''.join(answers) + b'--b--', {'Content-Type': 'multipart/mixed; boundary=b'})


def body_of(headers: Any, file: Any) -> bytes:
  """The body of a request, whole or in chunks; a client that has left before its end has sent none."""
  if headers.get('Transfer-Encoding', '').lower() != 'chunked':
    return whole(file, int(headers.get('Content-Length') or 0))
  chunks = []
  while size := int(file.readline().strip(), 16):
    chunks.append(whole(file, size))
    file.readline()
  file.readline()
  return b''.join(chunks)


def whole_line(file: Any, size: int) -> bytes:
  """The next line of a connection."""
  line = file.readline(size)
  if not line.endswith(b'\n'):
    raise ConnectionResetError('the client has left')
  return line


class WholeHeaders:
  """A handler that serves no request whose headers end with the connection; Python's takes that for their end."""

  rfile: Any

  def parse_request(self) -> bool:
    file = self.rfile
    self.rfile = SimpleNamespace(readline=lambda size=-1: whole_line(file, size))
    try:
      return super().parse_request()  # type: ignore[misc]
    finally:
      self.rfile = file


def whole(file: Any, size: int) -> bytes:
  """The next bytes of a connection."""
  data = file.read(size)
  if len(data) < size:
    raise ConnectionResetError('the client has left')
  return data


class S3Server:
  """moto's server of S3, where a write is checked and done in one step, as in the service.

  Attributes:
    bucket: URL of the latest bucket.
    requests: all requests so far.
    intercept: called with each request; an answer of it replaces the server's own.
    encrypts: whether tags are no checksums, as in a bucket that encrypts with a key.
    obeys, obeys_removals: whether conditions are obeyed; otherwise they are ignored, as by some servers.
  """

  def __init__(self) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WholeHeaders, WSGIRequestHandler):
      protocol_version = 'HTTP/1.1'

      def log(self, *_: Any) -> None:
        pass

      def connection_dropped(self, *_: Any) -> None:
        self.close_connection = True

    self.requests: list[Request] = []
    self.intercept: Interceptor = lambda request: None
    self.obeys = True
    self._application = DomainDispatcherApplication(create_backend_app)
    self._lock = threading.Lock()
    self._http = make_server('127.0.0.1', 0, self._wsgi, threaded=True, request_handler=Silent)
    threading.Thread(target=self._http.serve_forever, daemon=True).start()
    self.url = f'http://127.0.0.1:{self._http.server_port}'

  def close(self) -> None:
    self._http.shutdown()
    self._http.server_close()

  def with_bucket(self, name: str) -> S3Server:
    """The same server with nothing recorded, and an empty bucket more."""
    from moto.backends import get_backend

    self._backend = get_backend('s3')['123456789012']['aws']
    self._backend.create_bucket(name, 'us-east-1')
    self.bucket, self.obeys, self.encrypts = f's3://{name}', True, False
    self.obeys_removals = True
    self.requests.clear()
    self.intercept = lambda request: None
    return self

  def put(self, url: str, content: bytes) -> None:
    """Writes an object, as another process would."""
    bucket, _, name = url.removeprefix('s3://').partition('/')
    with self._lock:
      self._backend.put_object(bucket, name, content)

  def refusal(self, status: int, code: str) -> Answer:
    """An error as this server answers it."""
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>No.</Message></Error>'
    return Answer(
      status, body.encode(), {'Content-Type': 'application/xml', 'Content-Length': str(len(body))}
    )

  def _disguised(self, environ: dict[str, Any], start_response: Any) -> Any:
    """The application's answer with each tag in reverse: a tag that is no checksum."""
    environ = {
      key: turned(value) if key.startswith('HTTP_IF_') else value for key, value in environ.items()
    }
    started: list[Any] = []
    content = b''.join(self._application(environ, lambda *arguments: started.append(arguments)))
    status, headers = started[0][:2]
    start_response(
      status, [(name, turned(value) if name == 'ETag' else value) for name, value in headers]
    )
    return [turned(content.decode()).encode() if b'<ETag>' in content else content]

  def _wsgi(self, environ: dict[str, Any], start_response: Any) -> Any:
    headers = {
      key[5:].replace('_', '-').lower(): str(value)
      for key, value in environ.items()
      if key[:5] == 'HTTP_'
    }
    query = dict(urllib.parse.parse_qsl(environ['QUERY_STRING'], keep_blank_values=True))
    request = Request(environ['REQUEST_METHOD'], environ['PATH_INFO'], query, headers)
    self.requests.append(request)
    size = int(environ.get('CONTENT_LENGTH') or 0)
    if size:
      environ = {**environ, 'wsgi.input': io.BytesIO(whole(environ['wsgi.input'], size))}
    intercepted = self.intercept(request)
    if intercepted is not None:
      start_response(f'{intercepted.status} X', list(intercepted.headers.items()))
      return [b'' if request.method == 'HEAD' else intercepted.body]
    if not self.obeys or (request.method == 'DELETE' and not self.obeys_removals):
      environ = {
        key: value
        for key, value in environ.items()
        if key not in ('HTTP_IF_MATCH', 'HTTP_IF_NONE_MATCH')
      }
    if self.encrypts:
      return self._disguised(environ, start_response)
    with self._lock if request.method in ('PUT', 'DELETE', 'POST') else contextlib.nullcontext():
      return self._application(environ, start_response)
