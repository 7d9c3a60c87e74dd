#!/usr/bin/env sh
# Fetches CIFAR-10 in its binary version (162 MB) into examples/data/cifar-10-batches-bin and checks it.
set -eu
cd "$(dirname "$0")/data"
archive=cifar-10-binary.tar.gz
curl --fail --location --output "$archive" "https://www.cs.toronto.edu/~kriz/$archive"
echo "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd  $archive" | sha256sum --check
tar -xzf "$archive"
rm "$archive"
