import train      # noqa: F401   before torch: it sets how torch's idle threads wait
