"""Errors of buckets: those of TensorStore, fsspec and their libraries, with place, server and remedy.

A server's answer may repeat parts of the request, such as a session token. So no more than the code of an error
and its first sentence are shown, and the error itself is not chained.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from flax_spmd._src.checkpoint.storage.buckets import Location
from flax_spmd.errors import CheckpointError, CheckpointNotFoundError, CheckpointReadOnlyError

_RANGE = re.compile(
  r'.*Error reading Byte range \[.*?: '
)  # the array that TensorStore read, and its drivers
_STATUS = re.compile(r"http_response_code='(\d+)'")
_IDENTITY = {
  'InvalidAccessKeyId',
  'SignatureDoesNotMatch',
  'ExpiredToken',
  'InvalidToken',
  'Unauthorized',
}
_REGION = {'AuthorizationHeaderMalformed', 'PermanentRedirect', 'IllegalLocationConstraintException'}
_CUT = (  # an answer without its end
  'Failed to parse object metadata',
  'not found in response headers',
  'payload is not completed',
)
_SILENT = ('CURL', 'Connect', 'connect', 'timed out', 'Timeout', *_CUT)
_LONGEST = 300
_LOGIN = {
  'gs': 'run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS.',
  's3': 'set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), to valid ones.',
}
_SERVER = {'gs': 'the network', 's3': 'the network and AWS_ENDPOINT_URL'}


class Cause(NamedTuple):
  """What is known of an error.

  Attributes:
    text: its code and first sentence.
    code: the code of S3; '' if it has none.
    status: the HTTP status; 0 if there was no answer.
  """

  text: str
  code: str
  status: int

  @property
  def is_refusal(self) -> bool:
    """Whether the server, or the way to it, has refused the call: the state of the files is unknown."""
    return (
      self.status in (401, 403, 408, 429)
      or self.status >= 500
      or self.code in _IDENTITY | _REGION
      or any(word in self.text for word in _SILENT)
      or self.lacks_credentials
    )

  @property
  def lacks_credentials(self) -> bool:
    """Whether the client has found none, and has not asked the server."""
    return 'credentials' in self.text.lower() and not self.status


def explained(error: BaseException, verb: str, location: Location, name: str = '') -> CheckpointError:
  """The error to raise for one of TensorStore's or fsspec's.

  Args:
    error: that error.
    verb: attempted action: 'read', 'write', 'list' or 'remove'.
    location: where.
    name: the file or folder there.
  """
  cause = cause_of(error)
  url = '/'.join(filter(None, (f'{location.scheme}://{location.bucket}', location.path, name)))
  text = f'Cannot {verb} {url} ({location.endpoint}): {cause.text}.\nFix: '
  if isinstance(error, FileNotFoundError):
    return CheckpointNotFoundError(f'{text}pass the path of a checkpoint.')
  unknown = cause.status == 401 or cause.code in _IDENTITY or cause.lacks_credentials
  if unknown or (cause.status == 403 and location.is_anonymous):
    return CheckpointError(f'{text}{_LOGIN[location.scheme]}')
  if cause.code in _REGION or cause.status in (301, 307):
    return CheckpointError(f"{text}set AWS_DEFAULT_REGION to the bucket's region.")
  if cause.status == 403 or isinstance(error, PermissionError):
    kind = CheckpointReadOnlyError if verb in ('write', 'remove') else CheckpointError
    return kind(f'{text}let an owner of the bucket grant these credentials the right to {verb} there.')
  if cause.status in (429, 500, 502, 503, 504) or any(word in cause.text for word in _SILENT):
    return CheckpointError(f'{text}check {_SERVER[location.scheme]}, and repeat the call.')
  return CheckpointError(f'{text}check the path and the settings of the bucket, and repeat the call.')


def no_bucket(location: Location) -> CheckpointNotFoundError:
  """The error for a bucket that is not there."""
  return CheckpointNotFoundError(
    f'There is no bucket {location.scheme}://{location.bucket} ({location.endpoint}).\n'
    'Fix: create it, or correct its name.'
  )


def cause_of(error: BaseException) -> Cause:
  """Code, status and first sentence of an error."""
  client = error.__cause__ if hasattr(error.__cause__, 'response') else error
  response = getattr(client, 'response', None)
  response = response if isinstance(response, dict) else {}
  first = _RANGE.sub('', re.split(r' \[[a-zA-Z]|\n', str(error))[0])  # without TensorStore's context
  first = first.rstrip('. ')[:_LONGEST] or type(error).__name__
  text = re.sub(r'^[A-Z_]+: (All \d+ retry attempts failed: )?', '', first)
  match = _STATUS.search(str(error))
  status = match[1] if match else getattr(error, 'code', None)
  status = status or response.get('ResponseMetadata', {}).get('HTTPStatusCode')
  if first.startswith('Forbidden'):  # of gcsfs
    status, text = 403, str(error).replace('\n', ': ')[:_LONGEST].rstrip('. ')
  code = response.get('Error', {}).get('Code') or text.partition(':')[0]
  return Cause(text, code, int(status) if str(status).isdigit() else 0)
