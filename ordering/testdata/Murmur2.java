import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.HexFormat;
import org.apache.kafka.common.utils.Utils;

/**
 * Adds the hash of the Java client to keys in hexadecimal. murmur2.txt was made with
 * java -cp kafka-clients-4.1.0.jar:slf4j-api-1.7.36.jar Murmur2.java
 */
public class Murmur2 {
    public static void main(String[] args) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = in.readLine()) != null;) {
            System.out.println(line + " " + Utils.murmur2(HexFormat.of().parseHex(line)));
        }
    }
}
