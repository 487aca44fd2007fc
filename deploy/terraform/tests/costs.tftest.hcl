# What the outputs say a fleet costs, against a calculation by hand. deploy/terraform/README.md shows the same numbers.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  commit         = "0123456789abcdef0123456789abcdef01234567"
  alarm_email    = "someone@example.org"
  delete_results = true # so that the test can delete what it creates
}

# US dollars of a month, in small:
#   814.40  instances: 730 h x (0.1323 + 0.8048 + 2 x 0.1785 x 0.4 + 0.0893 x 0.4)
#    16.00  200 GiB of disks
#    36.50  5 endpoints in 1 zone
#     4.80  4 metrics of each of 4 names
#     2.19  60 reports an hour of each of 5 hosts
#     1.10  100 writes to S3 an hour of each of 3 hosts
#     1.90  19 metrics that alarms read
#     0.14  0.25 GB of logs
#     4.16  181 GB in the bucket: a day of 128 environments (74 GB), a week of checkpoints (106 GB)
#     5.50  KMS key 1.00, private zone 0.50, snapshots of the images 4.00: what a stopped fleet costs, too
#   886.69  of which an hour is 1.21
run "small" {
  assert {
    condition     = output.estimated_usd == { hour = "1.21", month = "887", month_stopped = "6", prices = "us-east-1, 2026-11" }
    error_message = "An hour and a month of small cost as by hand: not ${jsonencode(output.estimated_usd)}."
  }
}

# paper: 1584.39 instances, 27.20 disks, 36.50 endpoints, 4.80 metrics, 3.94 reports, 1.10 writes, 1.90 alarms, 0.24 logs,
# 7.26 bucket (209 + 106 GB), 5.50: together 1672.83, an hour 2.29.
run "paper" {
  variables {
    size = "paper"
  }

  assert {
    condition     = output.estimated_usd == { hour = "2.29", month = "1673", month_stopped = "6", prices = "us-east-1, 2026-11" }
    error_message = "An hour and a month of paper cost as by hand: not ${jsonencode(output.estimated_usd)}."
  }
}

run "prices_that_are_not_known_are_not_made_up" {
  variables {
    instance_types = { actor = ["c9x.large"] }
  }

  assert {
    condition     = startswith(output.estimated_usd.hour, "unknown") && startswith(output.estimated_usd.month, "unknown")
    error_message = "The cost says what it does not know: ${jsonencode(output.estimated_usd)}."
  }
}
